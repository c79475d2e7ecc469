"""An LLM without weights: the tokenizer, the template and the streams are real, and the tokens are written down."""

from __future__ import annotations

from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.control_tokens import ControlTokens
from jaxinfer.text.output import OutputStream
from jaxinfer.types import EngineInfo, FinishReason, TokenEvent


class WrittenLLM:
    """Answers with the given texts, or lists of token ids, one after another."""

    def __init__(self, tokenizer, config, *replies, max_model_len=4096):
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate.from_config(config)
        self.info = EngineInfo(
            model="written",
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            eos_ids=tokenizer.eos_ids,
            sampling_defaults={},
            page_size=16,
            num_pages=8,
            max_num_seqs=8,
            prefix_caching=True,
        )
        self._replies = list(replies)
        self.prompts = []
        self.cached = set()  # what a prefix cache would have: every beginning of what was computed

    def chat_prompt(self, messages, **options):
        tokens = ControlTokens(self.tokenizer, self.chat_template.source)
        guarded, mark = tokens.guard(messages)
        return tokens.encode(self.chat_template.render(guarded, **options), mark)

    def start(self, prompt, sampling_params, *, always_shown):
        prompt = list(prompt)
        self.prompts.append(prompt)
        reply = self._replies.pop(0)
        ids = self.tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else list(reply)
        output = OutputStream(self.tokenizer, prompt, sampling_params, always_shown=always_shown)
        cached = max((n for n in range(len(prompt)) if tuple(prompt[:n]) in self.cached), default=0)
        return output, self._deltas(output, prompt, ids, cached)

    def _deltas(self, output, prompt, ids, cached):
        eos = self.tokenizer.eos_ids[0]
        for number, id in enumerate([*ids, eos]):
            is_last = number == len(ids)
            event = TokenEvent(
                request_id="r",
                token_ids=(id,),
                finish_reason=FinishReason.STOP if is_last else None,
                stop_id=eos if is_last else None,
                cached_tokens=0 if number else cached,
            )
            computed = [*prompt, *ids]
            self.cached.update(tuple(computed[:n]) for n in range(len(computed)))
            if (delta := output.push(event)) is not None:
                yield delta
