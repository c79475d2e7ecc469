"""Records what transformers renders for chat conversations: tests/data/chat_goldens.json.

Run where transformers is installed, with the folder of the published tokenizers and the GGUF file of SmolLM2:

    python scripts/make_chat_goldens.py TOKENIZERS_FOLDER SMOLLM2_GGUF
"""

import argparse
import copy
import json
from pathlib import Path

import gguf
import tokenizers
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

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
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds pages.\n</tools> 'single', \\ and 日本語",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "enum": ["<a>", "b & c"]},
                "limit": {"type": ["integer", "null"], "default": None, "maximum": 1e3},
                "exact": {"type": "boolean", "default": True},
                "filters": {"type": "array", "items": {"type": "object", "properties": {"key": {"type": "string"}}}},
            },
        },
        "strict": True,
    },
}
ARGUMENTS = {"query": "größer <&> 'x' \"y\"\n", "limit": 2.5, "exact": None, "filters": [{}, {"key": "🦀"}]}
CONTROL = "<|im_end|>\n<|im_start|>assistant\n<think></think><tool_call></tool_response><｜Assistant｜>{{ bos_token }}"
STEPS = [
    user("Which of Rome and Oslo is warmer?"),
    assistant("", tool_calls=[call("get_weather", {"city": "Rome"})], reasoning_content="\nFirst Rome.\n"),
    ANSWER,
    assistant(
        "And now Oslo.", tool_calls=[call("get_weather", '{"city": "Oslo"}', "call_1")], reasoning_content="Oslo."
    ),
    {**ANSWER, "tool_call_id": "call_1", "content": "4"},
]
PARALLEL = [
    SYSTEM,
    user("Weather and time?"),
    assistant("", tool_calls=[call("get_weather", {"city": "Rome"}), call("get_time", {}, "call_1")]),
    ANSWER,
    {**ANSWER, "tool_call_id": "call_1", "name": "get_time", "content": ""},
]
REASONED = [
    SYSTEM,
    user("One?"),
    assistant("1", reasoning_content="It asks for one."),
    user("Two?"),
    assistant("\n\n2\n", reasoning="\n\nIt asks for two.\n\n"),
]
GO_ON = {"add_generation_prompt": False, "continue_final_message": True}
TOOLS = {"tools": [WEATHER, TIME]}
NO_PROMPT = {"add_generation_prompt": False}
THINKING_OFF = {"enable_thinking": False}
THINKING_ON = {"enable_thinking": True}
PUBLISHED_CONVERSATIONS = {
    "a system message and a user turn": ([SYSTEM, user("Hello")], {}),
    "a system message alone": ([SYSTEM], {}),
    "an empty system message": ([{"role": "system", "content": ""}, user("Hello")], {}),
    "an empty user turn": ([user("")], {}),
    "tools without a system message": ([user("Weather in Zürich?")], TOOLS),
    "tools with an empty system message": ([{"role": "system", "content": ""}, user("Hello")], TOOLS),
    "tools and thinking off": (TURNS, {**TOOLS, **THINKING_OFF}),
    "tools and thinking on": (TURNS, {**TOOLS, **THINKING_ON}),
    "a tool with a rich schema": ([user("Hello")], {"tools": [SEARCH]}),
    "a tool without its envelope": ([user("Hello")], {"tools": [WEATHER["function"]]}),
    "a call with rich arguments": (
        [user("Find it"), assistant("", tool_calls=[call("search", ARGUMENTS)]), {**ANSWER, "content": "größer\n"}],
        {"tools": [SEARCH]},
    ),
    "a call as its last turn": (STEPS[:2], {**TOOLS, **NO_PROMPT}),
    "a call without an envelope": (
        [user("Time?"), assistant("", tool_calls=[{"name": "get_time", "arguments": {}}]), ANSWER],
        TOOLS,
    ),
    "a call with null content": ([user("Time?"), assistant(None, tool_calls=[call("get_time", "{}")]), ANSWER], TOOLS),
    "a call with text arguments": ([user("Time?"), assistant("", tool_calls=[call("get_time", "{ }")]), ANSWER], TOOLS),
    "calls side by side": (PARALLEL, TOOLS),
    "calls side by side, then an answer": ([*PARALLEL, assistant("21, noon."), user("Thanks")], TOOLS),
    "calls one after another": (STEPS, TOOLS),
    "calls one after another, then thinking off": (STEPS, {**TOOLS, **THINKING_OFF}),
    "calls one after another, then an answer": (
        [*STEPS, assistant("Rome.", reasoning_content="21 > 4")],
        {**TOOLS, **NO_PROMPT},
    ),
    "calls one after another, then a turn": (
        [*STEPS, assistant("Rome.", reasoning_content="21 > 4"), user("Why?")],
        TOOLS,
    ),
    "calls in two turns": ([*STEPS, assistant("Rome."), *STEPS], TOOLS),
    "a tool result without a call": ([user("Hello"), ANSWER], {}),
    "tool results without a generation prompt": (PARALLEL, {**TOOLS, **NO_PROMPT}),
    "a tool result in a user turn": ([*STEPS[:2], user("<tool_response>\n21\n</tool_response>")], TOOLS),
    "reasoning before the last turn": ([*REASONED, user("Three?")], {}),
    "reasoning before the last turn, thinking off": ([*REASONED, user("Three?")], THINKING_OFF),
    "reasoning before the last turn, thinking on": ([*REASONED, user("Three?")], THINKING_ON),
    "reasoning in the last turn": (REASONED, NO_PROMPT),
    "empty reasoning": ([user("Hi"), assistant("Hello", reasoning_content="")], NO_PROMPT),
    "thoughts in the last turn": (THOUGHT[:2], NO_PROMPT),
    "thoughts without a beginning": ([user("Hi"), assistant("A greeting.\n</think>\n\nHello!"), user("Bye")], {}),
    "thoughts twice": ([user("Hi"), assistant("<think>a</think>b<think>c</think>d")], NO_PROMPT),
    "thinking off without a generation prompt": (TURNS, {**NO_PROMPT, **THINKING_OFF}),
    "several turns without a generation prompt": (TURNS, NO_PROMPT),
    "control tokens in every turn": (
        [
            {"role": "system", "content": CONTROL},
            user(CONTROL),
            assistant(CONTROL),
            {**ANSWER, "content": CONTROL},
            user("<s>"),
        ],
        {},
    ),
    "unicode in every turn": (
        [
            {"role": "system", "content": "Ответь. \u00a0"},
            user("e\u0301 é ﬁ \u200b"),
            assistant("👩🏽‍🚀\r\n\t"),
            user("\x00\x7f𝔘"),
        ],
        {},
    ),
    "an assistant's turn first": ([assistant("Welcome."), user("Hello")], {}),
    "two user turns": ([user("a"), user("b")], {}),
    "an unknown role": ([{"role": "developer", "content": "Be brief."}, user("Hello")], {}),
    "continued answer with white space": ([user("Hi"), assistant("\n Hello,  ")], GO_ON),
    "continued answer with reasoning": ([user("Hi"), assistant("Hello, ", reasoning_content="A greeting.")], GO_ON),
    "continued thoughts": ([user("Hi"), assistant("<think>\nA gree")], GO_ON),
    "continued answer after thoughts": ([user("Hi"), assistant("<think>\nA greeting.\n</think>\n\nHel")], GO_ON),
    "continued answer after tool results": ([*PARALLEL, assistant("It is")], {**TOOLS, **GO_ON}),
    "continued answer, thinking off": ([*TURNS, assistant("8 b")], {**GO_ON, **THINKING_OFF}),
    "continued user turn": ([SYSTEM, user("What is 2 +")], GO_ON),
    "continued answer with control tokens": ([user("Hi"), assistant("<|im_end|> 한국")], GO_ON),
    "continued answer that was said before": ([user("Hi"), assistant("Hi"), user("Hi"), assistant("Hi")], GO_ON),
    "continued call": (STEPS[:2], {**TOOLS, **GO_ON}),
}
"""Only for the published templates: what the small ones would do with them says nothing more."""
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
        respelled = render_respelled(tokenizer, messages, options)
        return {"error": str(error)} | ({} if respelled is None else {"respelled": respelled})


def render_respelled(tokenizer, messages, options):
    """The text where tool calls are spelled as the template wants them; None where there is no such spelling.

    DeepSeek's template tests for a null content, which apply_chat_template takes away, and wants arguments as text.
    Qwen's adds to the content and needs an empty one.
    """
    variables = {
        "chat_template": tokenizer.get_chat_template(None, options.get("tools")),
        **tokenizer.special_tokens_map,
    }
    for content in (None, ""):
        for as_text in (False, True):
            spelled = [respell(message, content, as_text) for message in messages]
            if spelled == messages and content is not None:
                continue
            try:
                return render_jinja_template([spelled], **variables, **options)[0][0]
            except Exception:
                continue
    return None


def respell(message, content, as_text):
    if not message.get("tool_calls"):
        return message
    message = copy.deepcopy(message)
    if message.get("content") is None:
        message["content"] = content
    for tool_call in message["tool_calls"] if as_text else []:
        function = tool_call.get("function", tool_call)
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return message


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
    published = {**CONVERSATIONS, **PUBLISHED_CONVERSATIONS}
    goldens = {
        "conversations": {name: {"messages": m, "options": o} for name, (m, o) in published.items()},
        "small_templates": SMALL_TEMPLATES,
        "special_tokens": special,
        "rendered": {
            subject: {
                name: render(tokenizer, m, o)
                for name, (m, o) in (CONVERSATIONS if subject in SMALL_TEMPLATES else published).items()
            }
            for subject, tokenizer in subjects.items()
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n")
    for subject, texts in goldens["rendered"].items():
        print(subject, {name: out["error"][:100] for name, out in texts.items() if "error" in out})


if __name__ == "__main__":
    main()
