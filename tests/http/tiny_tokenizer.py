"""A tokenizer and a chat template small enough to be made for each test run."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxinfer.text.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat", "Hello world! ABC DEF", "café für 한국어"] * 4
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user must speak first') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefix | default('') }}{% endif %}"
)


def make_tokenizer(template=TEMPLATE, *, added=(), special=()):
    """Byte-level BPE whose post-processor puts a beginning-of-sequence token in front."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    first = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=first, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens(list(added))
    library.add_special_tokens(list(special))
    library.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": template}
    return Tokenizer(library.to_str(), config), config
