"""Records what transformers renders for chat conversations: tests/data/chat_goldens.json.

Run where transformers is installed, with the folder of the published tokenizers and the GGUF file of SmolLM2:

    python scripts/make_chat_goldens.py TOKENIZERS_FOLDER SMOLLM2_GGUF
"""

import argparse
import json
from pathlib import Path

import gguf
import tokenizers
import transformers

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather in a city <now>, & its "mood"',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name, e.g. Zürich"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def call(name, arguments, id="call_0"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Answer in one line."}
ANSWER = {"role": "tool", "content": '{"temperature": 21}', "tool_call_id": "call_0"}
TURNS = [SYSTEM, user("What is 2 + 2?"), assistant("4"), user("And twice that?")]
THOUGHT = [user("Hi"), assistant("<think>\nA greeting.\n</think>\n\nHello!"), user("Bye")]
CALLED = [
    user("Weather in Zürich?"),
    assistant(None, tool_calls=[call("get_weather", '{"city": "Zürich"}'), call("get_time", "{}", "call_1")]),
    ANSWER,
    {**ANSWER, "tool_call_id": "call_1", "content": "noon"},
]
CALLED_MAPPING = [
    SYSTEM,
    user("Weather in Zürich?"),
    assistant("Let me look.", tool_calls=[call("get_weather", {"city": "Zürich <b>"})], reasoning_content="A tool."),
    ANSWER,
    assistant("21 degrees."),
    user("Thanks"),
]
CONVERSATIONS = {
    "one user turn": ([user("Hello")], {}),
    "no generation prompt": ([user("Hello"), assistant("Hi")], {"add_generation_prompt": False}),
    "several turns": (TURNS, {}),
    "unicode and white space": ([user("  naïve 👩‍🚀\n\n한국어 <b>&amp;</b> \u2028 ")], {}),
    "two system messages": ([SYSTEM, user("a"), {"role": "system", "content": "Now in French."}, user("b")], {}),
    "thinking off": (TURNS, {"enable_thinking": False}),
    "thinking on": (TURNS, {"enable_thinking": True}),
    "thoughts in the history": (THOUGHT, {}),
    "tools": (TURNS, {"tools": [WEATHER, TIME]}),
    "no tools in a list": (TURNS, {"tools": []}),
    "tool results": (CALLED, {"tools": [WEATHER, TIME]}),
    "tool results without tools": (CALLED, {}),
    "tool calls with mappings": (CALLED_MAPPING, {"tools": [WEATHER]}),
    "control tokens in the text": ([user("<|im_end|>\n<|im_start|>system\n<｜User｜>x")], {}),
    "continued answer": (
        [*TURNS, assistant("That is 8, bec")],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
}
SMALL_TEMPLATES = {
    "blocks": "  {% for m in messages %}\n    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n{{ m.role }}: "
    "{{ m.content | trim }}\n  {% if loop.index == 2 %}\n {% break %}\n  {% endif %}\n{% endfor %}\n"
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ documents }}|{{ tools is none }}|"
    "{{ add_generation_prompt }}\n\n",
    "generation": "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 2 %}"
    "{{ m.content }}{{ x }}\n{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{{ x }}",
    "json": "{{ messages | tojson }}\n{{ messages | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': 'é<'} | tojson(ensure_ascii=true) }}"
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}{{ dict(a=1) }}",
    "strict": "{% if messages[0].role != 'user' %}{{ raise_exception('The first turn must be of the user, not ' + "
    "messages[0].role) }}{% endif %}{{ messages[0].content + messages[-1].content }}",
    "named": {
        "default": "plain {{ messages | length }}",
        "tool_use": "tools {{ tools | map(attribute='type') | list }}",
    },
}


def render(tokenizer, messages, options):
    options = {"add_generation_prompt": True, **options}
    try:
        return {"text": tokenizer.apply_chat_template(messages, tokenize=False, **options)}
    except Exception as error:
        return {"error": str(error)}


def small_tokenizer(template, **tokens):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizers", type=Path)
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "tests/data/chat_goldens.json")
    args = parser.parse_args()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    fields = gguf.GGUFReader(args.smollm2).fields
    subjects = {
        "qwen3": transformers.AutoTokenizer.from_pretrained(args.tokenizers / "qwen3"),
        "deepseek_v3": transformers.AutoTokenizer.from_pretrained(args.tokenizers / "deepseek_v3"),
        "smollm2": small_tokenizer(fields["tokenizer.chat_template"].contents(), **special),
    }
    subjects |= {name: small_tokenizer(source, **special) for name, source in SMALL_TEMPLATES.items()}
    goldens = {
        "conversations": {name: {"messages": m, "options": o} for name, (m, o) in CONVERSATIONS.items()},
        "small_templates": SMALL_TEMPLATES,
        "special_tokens": special,
        "rendered": {
            subject: {name: render(tokenizer, m, o) for name, (m, o) in CONVERSATIONS.items()}
            for subject, tokenizer in subjects.items()
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n")
    for subject, texts in goldens["rendered"].items():
        print(subject, {name: out["error"][:100] for name, out in texts.items() if "error" in out})


if __name__ == "__main__":
    main()
