"""Makes random Jinja expressions, and the constructs of chat templates, with the texts of Jinja2 as transformers sets it up:

    python jinja.py OUT.json [--count 2000] [--seed SEED]
    python jinja.py --record

A case has a template, a line of a `--sft` file as text, and Jinja2's `text` or `error`. With --record, writes the shorter list in
tests/golden/chat. PyTorch is not needed. The tests `jinja_is_rendered_as_by_transformers` render the same lines."""

import argparse
import copy
import json
import pathlib
import random
import re

from transformers.utils.chat_template_utils import render_jinja_template

RECORDED = pathlib.Path(__file__).resolve().parent.parent / "golden" / "chat" / "expressions.json"
MESSAGES = [{"role": "user", "content": "Hi there, Ann"}, {"role": "assistant", "content": "Fine.\n"}]
VARIABLES = {
    "n": 3, "z": 0, "neg": -5, "f": 2.5, "one": 1.0, "tiny": 1e-7, "small": 0.0001, "large": 1e16, "exact": 123456789.125,
    "b64": 2**64, "b63": 2**63, "t": True, "fa": False, "no": None, "e": "", "s": "ab c", "u": "Grüße 你好",
    "q": "it's \"x\" \\ y\n", "sp": "  pad \t\n", "csv": "a,b,,c", "num": "42", "flt": " 3.7 ", "tag": "<b>&'\"</b>",
    "ctrl": "\u0000\u001f\u007f\u00a0\u2028\ufeff", "lines": "x\r\ny\rz\n\nw", "l": [3, 1, 2], "el": [], "ed": {},
    "ls": ["b", "A", "c", "a"], "mix": [1, "1", 1.0, None, True, [1], {"k": 2}], "ll": [[1, 2], [3, 4]],
    "d": {"k": "v", "z": [1, {"y": 1e-5}], "a": None}, "sub": {"items": [1], "keys": "own", "name": "x"},
    "ld": [{"a": 1, "b": "x"}, {"a": 2, "b": "Y"}, {"b": "x"}], "w": ["one", "two"],
}
STRINGS = ["", "a", "b", "ab", " ", ",", "a,b", "x\\n", "\\t", "1", "A", "é", "'", "</s>", "c"]
NAMES = [*VARIABLES, "missing", "messages", "tools"]
TESTS = (
    "defined undefined none string number integer float boolean mapping iterable sequence true false callable odd even "
    "lower upper"
).split()
TESTS_OF_ONE = ["eq", "ne", "lt", "le", "gt", "ge", "equalto", "in", "divisibleby", "sameas"]
FILTERS = (
    "abs capitalize count default e escape first float int items join last length list lower max min reverse round safe "
    "sort string sum title tojson trim unique upper dictsort"
).split()
METHODS = (
    "upper lower strip lstrip rstrip split rsplit splitlines title capitalize isdigit isalpha isalnum isspace islower isupper "
    "items keys values copy"
).split()
METHODS_OF_ONE = "strip lstrip rstrip split rsplit startswith endswith find rfind count index removeprefix removesuffix join get".split()
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def one(self, of):
        return self.random.choice(of)

    def string(self):
        return "'" + self.one(STRINGS).replace("'", "\\'") + "'"

    def number(self):
        return self.one(["0", "1", "2", "3", "-1", "-2", "7", "10", "0.5", "1.5", "2.0", "1e3", "100", "1e-6", "3.14159"])

    def atom(self):
        kind = self.random.random()
        if kind < 0.5:
            return self.one(NAMES)
        if kind < 0.65:
            return self.string()
        if kind < 0.8:
            return self.number()
        if kind < 0.85:
            return self.one(["true", "false", "none", "True", "None"])
        if kind < 0.9:
            return "[" + ", ".join(self.atom() for _ in range(self.random.randrange(4))) + "]"
        if kind < 0.93:
            return "(" + "".join(self.atom() + ", " for _ in range(self.random.randrange(3))) + ")"
        if kind < 0.96:
            return "{" + ", ".join(f"{self.string()}: {self.atom()}" for _ in range(self.random.randrange(3))) + "}"
        return self.one(["range(3)", "range(1, 6, 2)", "dict(a=1, b='x')", "namespace(a=1).a", "messages[0].content", "d.z[1].y"])

    def option(self):
        """A filter with arguments."""
        return self.one([
            lambda: f"replace({self.string()}, {self.string()})", lambda: f"replace({self.string()}, {self.string()}, 1)",
            lambda: f"join({self.string()})", lambda: f"default({self.atom()})", lambda: f"default({self.atom()}, true)",
            lambda: f"round({self.one(['1', '2', '3'])})", lambda: "tojson(indent=2)", lambda: "tojson(sort_keys=true)",
            lambda: "tojson(separators=(',', ':'))", lambda: "tojson(ensure_ascii=true)", lambda: "tojson(ensure_ascii=False, indent=4)",
            lambda: f"map({self.one(['attribute=', '']) or ''}{self.one(QUOTED)}) | list", lambda: f"select({self.one(QUOTED_TESTS)}) | list",
            lambda: f"reject({self.one(QUOTED_TESTS)}) | list", lambda: f"selectattr({self.one(QUOTED)}) | list",
            lambda: f"selectattr({self.one(QUOTED)}, 'equalto', {self.atom()}) | list", lambda: f"rejectattr({self.one(QUOTED)}, 'defined') | list",
            lambda: f"trim({self.string()})", lambda: f"indent({self.number()})", lambda: "indent(2, true)", lambda: f"truncate({self.number()})",
            lambda: f"center({self.number()})", lambda: f"batch({self.number()}) | list", lambda: "sort(reverse=true)", lambda: "sort(attribute='a')",
            lambda: f"int({self.number()})", lambda: f"float({self.number()})", lambda: "format(3, 'x')", lambda: "sum(attribute='a')",
            lambda: "dictsort(by='value')", lambda: "unique | list", lambda: "map('upper') | join(' ')", lambda: "map(attribute='b') | join",
            lambda: "reverse | list", lambda: "items | list", lambda: f"join({self.string()}, attribute='b')", lambda: "nosuchfilter",
            lambda: "max(attribute='a')", lambda: "wordcount", lambda: "truncate(5, true, '')", lambda: "map('int') | sum",
        ])()

    def method(self):
        return self.one([
            lambda: f"{self.one(METHODS)}()", lambda: f"{self.one(METHODS_OF_ONE)}({self.atom()})",
            lambda: f"{self.one(METHODS_OF_ONE)}({self.string()})", lambda: f"split({self.string()}, {self.number()})",
            lambda: f"rsplit({self.string()}, 1)", lambda: f"replace({self.string()}, {self.string()})",
            lambda: f"replace({self.string()}, {self.string()}, {self.number()})", lambda: f"get({self.string()}, {self.atom()})",
            lambda: f"format({self.atom()}, {self.atom()})", lambda: f"startswith(({self.string()}, {self.string()}))",
            lambda: f"find({self.string()}, {self.number()})", lambda: f"count({self.string()}, 1)", lambda: f"zfill({self.number()})",
            lambda: f"partition({self.string()})", lambda: f"ljust({self.number()})", lambda: f"split(maxsplit={self.number()})",
            lambda: "append(1)", lambda: "nosuchmethod()", lambda: "items() | list", lambda: "values() | list", lambda: "splitlines(true)",
        ])()

    def expression(self, depth):
        if depth == 0:
            return self.atom()
        inner = lambda: self.expression(depth - 1 if self.random.random() < 0.7 else 0)
        wrapped = lambda: f"({inner()})" if self.random.random() < 0.8 else self.one(NAMES)
        kind = self.random.random()
        if kind < 0.24:
            return f"{wrapped()} {self.one(OPERATORS)} {wrapped()}"
        if kind < 0.38:
            return f"{wrapped()} | {self.one(FILTERS)}"
        if kind < 0.5:
            return f"{wrapped()} | {self.option()}"
        if kind < 0.62:
            return f"{wrapped()}.{self.method()}"
        if kind < 0.7:
            return f"{wrapped()} is {self.one(['', 'not '])}{self.one(TESTS)}"
        if kind < 0.74:
            return f"{wrapped()} is {self.one(TESTS_OF_ONE)}({inner()})"
        if kind < 0.8:
            return f"{wrapped()}[{inner() if self.random.random() < 0.5 else self.one(['0', '1', '-1', '5', repr('k'), repr('a')])}]"
        if kind < 0.87:
            bound = lambda: self.one(["", "", "0", "1", "2", "-1", "-2", "5", "-9", "n"])
            step = self.one(["", "", ":", ":2", ":-1", ":-2", ":1"])
            return f"{wrapped()}[{bound()}:{bound()}{step}]"
        if kind < 0.91:
            return f"{wrapped()}.{self.one(['k', 'a', 'b', 'z', 'items', 'name', 'missing', 'role', 'content'])}"
        if kind < 0.94:
            return f"{inner()} if {inner()} else {inner()}"
        if kind < 0.96:
            return f"not {wrapped()}"
        if kind < 0.98:
            return f"{wrapped()} {self.one(['<', '==', 'in', '>='])} {wrapped()} {self.one(['<', '==', '!='])} {wrapped()}"
        return f"-{wrapped()}"

    def template(self):
        if self.random.random() < 0.85:
            return "{{ " + self.expression(self.random.randrange(1, 4)) + " }}"
        name, text = self.expression(1), self.expression(1)
        return self.one([
            "{%% for v in %s %%}[{{ v }}{{ loop.index }}{{ loop.last }}]{%% else %%}none{%% endfor %%}" % name,
            "{%% for v in %s if v %%}[{{ v }}]{%% endfor %%}" % name,
            "{%% for k, v in %s %%}{{ k }}={{ v }};{%% endfor %%}" % name,
            "{%% for k, v in %s.items() %%}{{ k }}={{ v }};{%% endfor %%}" % self.one(NAMES),
            "{%% if %s %%}\n  yes {%% elif %s %%}\n maybe\n{%% else %%} no{%% endif %%}\n" % (name, text),
            "{%% set v = %s %%}\n{{ v }}|{{ v is string }}" % name,
            "{%% set v %%}{{ %s }}{%% endset %%}{{ v | length }}{{ v }}" % name,
            "{%% macro m(a, b=%s) %%}{{ a }}-{{ b }}{%% endmacro %%}{{ m(%s) }}" % (name, text),
            "{%% set ns = namespace(v=%s) %%}{%% set ns.v = [ns.v] %%}{{ ns.v }}" % name,
            "{%%- set v, w = %s -%%}{{ v }}{{ w }}" % name,
            "{%% set v = %s | map('upper') %%}{{ v | list }}{{ v | list }}" % self.one(NAMES),
        ])


QUOTED = ["'a'", "'b'", "'role'", "'content'", "'upper'", "'length'", "'string'", "'k'", "'0'", "'z.1'"]
QUOTED_TESTS = ["'defined'", "'string'", "'none'", "'odd'", "'gt', 1", "'equalto', 'a'", "'in', [1, 2]", "'number'", ""]

CALL = {"id": "call_00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "rate": 1e-05, "id": 2**64, "on": True, "s": "é<"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.\nWell",
        "parameters": {
            "type": "object",
            "required": ["a"],
            "properties": {"a": {"type": "integer", "description": "one"}, "l": {"type": "array", "items": {"type": "string"}}},
        },
        "return": {"type": "number"},
    },
}
# Conversations, and other keys of the line.
LINES = {
    "plain": {"messages": MESSAGES},
    "system": {"messages": [{"role": "system", "content": " Be brief.\r\n"}, *MESSAGES, {"role": "user", "content": "  Grüße! 你好 "}]},
    "calls": {
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "name": "add", "tool_call_id": "call_00001", "content": "3"},
            {"role": "assistant", "content": "It is 3."},
        ],
        "tools": [TOOL],
    },
    "thinks": {
        "messages": [
            MESSAGES[0],
            {"role": "assistant", "thinking": "Hm.", "content": "<think>\nHm.\n</think>\n\nYes</think> no"},
            {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "image"}]},
            {"role": "assistant", "reasoning_content": "So\n", "content": "\n\nDone"},
        ],
        "enable_thinking": False,
    },
    "documents": {
        "messages": MESSAGES,
        "documents": [{"title": "T", "text": "words of it"}, {"title": "U", "text": "more"}],
        "date_string": "26 Jul 2024",
    },
}
# Constructs of the templates of public models, rewritten. Each line is rendered for each conversation.
CONSTRUCTS = """
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate!') }}{% endif %}{{ message['content'] | trim + ' ' }}{% endfor %}
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{{ loop_messages | length }}{{ system_message }}
{% for message in loop_messages | default(messages) %}{% if loop.index0 == 0 and system_message is defined %}S{% else %}{% set content = message['content'] %}{{ '[INST] ' + (content | string).strip() + ' [/INST]' }}{% endif %}{% endfor %}
{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + (m['content'] | string | trim) + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ date_string }}{{ tools is not none }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{%- for message in messages %}{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}{{- message.role }}{%- elif 'tool_calls' in message %}{%- if not message.tool_calls | length == 1 %}{{- raise_exception("one only") }}{%- endif %}{%- set tool_call = message.tool_calls[0].function %}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{%- elif message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- for tool_call in message.tool_calls or [] %}{{- tool_call.function.name + "." + "call(" }}{%- for arg_name, arg_val in tool_call.function.arguments | items %}{{- arg_name ~ '="' ~ arg_val ~ '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- ")" }}{%- endfor %}{%- endfor %}
{%- if tools %}{{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools>" }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}{{ ns.last_query_index }}{{ ns.multi_step_tool }}
{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}{%- set reasoning_content = '' %}{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}{%- else %}{%- if '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{%- endif %}{{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{{ enable_thinking | default(true) }}
{%- for message in messages %}{%- if message.role == "tool" %}{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- for tool_call in message.tool_calls or [] %}{%- if (loop.first and message.content) or (not loop.first) %}{{- '\\n' }}{%- endif %}{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}{%- endfor %}{%- endfor %}
{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}{%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}{{ '<end_of_turn>\\n' }}{%- endfor -%}
{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{%- set ns.system_prompt = ns.system_prompt + message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'assistant' and message['content'] is none %}N{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{%- set content = message['content'] %}{% if '</think>' in (content or '') %}{% set content = content.split('</think>')[-1] %}{% endif %}{{ content }}{%- endif %}{%- endfor -%}
{%- if not tools is defined or tools is none %}{%- set tools = [] %}{%- endif %}{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}{{ user_messages | length }}{%- for message in messages | rejectattr("role", "equalto", "system") %}{%- if message.content is not none and message["role"] == "user" %}{%- if tools is not none and (message == user_messages[-1]) %}{{- "[AVAILABLE_TOOLS][" }}{%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}{%- for key, val in tool.items() if key != "return" %}{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- "}}" }}{%- endfor %}{%- endif %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if message.tool_calls is defined and message.tool_calls is not none %}{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}{%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- ', "id": "' + tool_call.id[-9:] + '"}' }}{%- endif %}{%- endfor %}{%- endif %}{%- endfor %}
{%- macro json_to_python_type(json_spec) %}{%- set basic = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}{%- if basic[json_spec.type] is defined %}{{- basic[json_spec.type] }}{%- elif json_spec.type == "array" %}{{- "list[" + json_to_python_type(json_spec['items']) + "]" }}{%- elif json_spec.type is iterable and json_spec.type is not string %}U{%- else %}{{- "Any" }}{%- endif %}{%- endmacro %}{%- for tool in tools or [] %}{%- for name, fields in tool.function.parameters.properties | items %}{{- name + ": " + json_to_python_type(fields) }}{%- endfor %}{%- endfor %}
{%- macro document_turn(documents) -%}{%- for doc in documents or [] -%}{{ loop.index0 }} {{ doc | tojson }}{% endfor %}{%- endmacro %}{{ document_turn(documents) }}{% for doc in documents or [] %}{% for key, value in doc.items() %}{{ key | title }}: {{ value }}\\n{% endfor %}{% endfor %}
{%- for document in documents or [] %}{%- if 'title' in document.keys() | list %}{{ document['title'].upper() ~ '=' ~ document.get('text', '') | replace('o', '0') }}{%- endif %}{%- endfor %}
a\\n{% raw %}\\n x{{ y }}{% endraw %}\\nb
a\\n{%- raw -%}\\n x{{ y }}{%- endraw %}\\nb
{%- set available_tools = tools | map(attribute='function') | map(attribute='name') | join(', ') if tools else 'none' %}{{ available_tools }}
{%- if strftime_now is defined %}has{% endif %}{%- set today = strftime_now('%Y') | int > 2000 if strftime_now is defined else false %}{{ today }}
{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\\n' + message['content']|string + eos_token|default('') }}{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}{{ eos_token }}{% endgeneration %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}
{%- for message in messages %}{%- if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{%- endif %}{{ '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>' ~ '\\n' }}{%- endfor %}
{{ (messages|selectattr('role', 'equalto', 'system')|list|last).content|trim if (messages|selectattr('role', 'equalto', 'system')|list) else '' }}
{%- set sys = messages | selectattr('role', 'in', ['system', 'developer']) | map(attribute='content') | join('\\n') %}{{ sys }}{%- for m in messages if m.role not in ['system', 'developer'] %}{{ loop.index }}{{ loop.previtem.role if loop.previtem is defined else '-' }}{{ loop.nextitem.role if not loop.last else '.' }}{%- endfor %}
{%- macro render_typescript_type(spec, required, is_nullable=false) -%}{%- if spec.type == "array" -%}{%- if spec['items'] -%}{{ spec['items'].type }}[]{%- else -%}any[]{%- endif -%}{%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping and spec.type[0] is defined -%}{{ spec.type | join(" | ") }}{%- elif spec.oneOf -%}O{%- else -%}{{ spec.type }}{%- endif -%}{%- endmacro -%}{%- for tool in tools or [] -%}{%- set tool = tool.function -%}{{ "// " + tool.description.split('\\n') | join('\\n// ') }}{%- for param_name, param_spec in tool.parameters.properties.items() -%}{{ param_name }}{%- if param_name not in (tool.parameters.required or []) -%}?{%- endif -%}: {{ render_typescript_type(param_spec, tool.parameters.required or []) }}{%- if param_spec.default is defined -%}D{%- endif -%}{%- if not loop.last %},{% endif -%}{%- endfor -%}{%- endfor -%}
{%- for message in messages %}{%- if message.thinking is defined and message.thinking %}{{ '<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}{%- if message.content is not string and message.content %}{%- for part in message.content %}{{ part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}{%- endfor %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message['content'] if message['content'] is string else (message['content'] or []) | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('') %}{%- if loop.index0 == 0 %}{%- set content = bos_token|default('') + content %}{%- endif %}{{ content }}{%- endfor %}
{%- for message in messages -%}\n    {%- if message.role == 'user' %}\n        {{- message.content }}\n    {%- else %}\n  {{ message.role -}}\n    {% endif %}\n{% endfor %}\n  tail\n
{# a comment #}\n{%- for m in messages %}\n{{ m.role }}\n{%- if not loop.last %}\n\n{% endif %}\n{%- endfor -%}\n
{% for m in messages %}{{ m.role | capitalize }}: {{ m.content | upper if m.content is string }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}
{%- set loop_messages = messages %}{%- for message in loop_messages %}{%- if message['role'] not in ['user', 'assistant', 'tool', 'system'] %}{{- raise_exception('Invalid role: ' ~ message['role']) }}{%- endif %}{%- if message.get('tool_calls') %}{{- message['tool_calls'] | map(attribute='function') | map(attribute='arguments') | first | tojson }}{%- endif %}{%- endfor %}
{%- for tool in tools or [] %}{%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}{{ '<function>\\n<name>' ~ tool.name ~ '</name>' }}{%- if tool.description is defined %}{{ tool.description | trim }}{%- endif %}{%- if tool.parameters is defined and tool.parameters is mapping and tool.parameters.properties is defined and tool.parameters.properties is mapping %}{%- for param_name, param_fields in tool.parameters.properties|items %}{%- set handled = ['name', 'type', 'description'] %}{%- for json_key in param_fields.keys() | reject('in', handled) %}{%- set normed = json_key | replace('-', '_') | replace(' ', '_') | replace('$', '') %}{%- if param_fields[json_key] is mapping %}{{ normed ~ (param_fields[json_key] | tojson | safe) }}{%- else %}{{ normed ~ (param_fields[json_key] | string) }}{%- endif %}{%- endfor %}{%- endfor %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- for tc in message.tool_calls or [] %}{%- set args = tc['function']['arguments'] %}{%- for k, v in args.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>{% endfor %}{%- endfor %}{%- endfor %}
{{ messages | map(attribute='role') | unique | list }} {{ messages | groupby('role') | length }}
{%- set has = namespace(image=false) %}{%- for m in messages %}{%- if m.content is not string and m.content is not none %}{%- for p in m.content or [] %}{%- if p['type'] in ('image', 'image_url') or 'image' in p %}{%- set has.image = true %}{%- endif %}{%- endfor %}{%- endif %}{%- endfor %}{{ has.image }}
{%- if messages[-1].role == 'assistant' %}{{- messages[-1]['content'].rstrip() + '|' }}{%- endif %}{{ messages[0].content.split(' ')[0] }}{{ (messages | first)['content'][:2] }}
{%- if tools is iterable and tools | length > 0 %}{{ 'T' }}{% endif %}{% if documents is iterable and documents | length %}D{% endif %}{{ documents | length if documents else 0 }}
{%- for message in messages %}{{ message.content.removeprefix('<think>') if message.content is string }}{{ message.content.rsplit(' ', 1)[-1] if message.content is string }}{% endfor %}
{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}
{% call(x) wrap() %}{{ x }}{% endcall %}
{% macro wrap(n) %}[{{ caller(n) }}]{% endmacro %}{% call(x) wrap(3) %}{{ x }}{{ messages | length }}{% endcall %}
{% set x %}{% for m in messages %}{{ m.role[0] }}{% endfor %}{% endset %}{{ x }}{% filter upper %}{{ x }}{% endfilter %}{% with y = x %}{{ y }}{% endwith %}
{% generation %}{% set inner = 1 %}{% endgeneration %}{{ inner }}{{ 'a' if inner is defined else 'b' }}
{{ '%s: %d, %.2f%%' % ('a', 3, 2.5) }} {{ '%-5s|' % 'ab' }} {{ '%s' | format(messages | length) }} {{ '{}-{b}'.format(1, b='x') }}
{{ [messages | length, 1.0, true, none, 'it\\'s'] | string | length }} {{ 'a' * 3 }} {{ 7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 7 / 2 }}
""".strip().split("\n")

# One of each kind that MiniJinja renders differently by default, or that Python's values make surprising.
EXPRESSIONS = """
{{ tiny }} {{ large }} {{ small }} {{ f }} {{ one }} {{ b64 }} {{ 1e-5 }} {{ 1e16 }} {{ 1.5e300 * 1 }} {{ [tiny, 1e22] }} {{ 'v=' ~ tiny }} {{ tiny | string }}
{{ d | tojson }} {{ [tiny, large, b64, one, 1e-5, true, none] | tojson }} {{ VARIABLE | default(b64) | tojson }} {{ u | tojson(ensure_ascii=true) }}
{{ d | tojson(separators=(',', ':')) }} {{ d | tojson(indent=2) }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ ctrl | tojson }} {{ q }} {{ [q, u, ctrl] }}
{{ s is sequence }} {{ d is sequence }} {{ l is sequence }} {{ missing is sequence }} {{ n is sequence }} {{ range(2) is sequence }}
{{ no is iterable }} {{ tools is iterable }} {{ missing is iterable }} {{ s is iterable }} {{ missing | length }} {{ missing is callable }} {{ range is callable }}
{{ '%s is %d and %.2f, %5s|%-5s|%05d %%' % ('a', 3, 2.5, 'x', 'y', 42) }} {{ '%s' % n }} {{ '%s %s' % (no, [tiny]) }} {{ 'a %s' | format(u) }}
{{ csv.rsplit(',', 1) }} {{ csv.rsplit(',') }} {{ s.rsplit() }} {{ csv.split(',', 1) }} {{ sp.split() }} {{ 'a  b'.split(' ') }}
{{ s.removeprefix('ab') }} {{ s.removesuffix('c') }} {{ s.partition(' ') }} {{ s.rpartition('x') }} {{ lines.splitlines() }} {{ lines.splitlines(true) }}
{{ s[::-1] }} {{ s[2:0:-1] }} {{ s[-10::-1] }} {{ l[5:1:-1] }} {{ l[-2:] }} {{ (1, 2, 3)[1:] }} {{ range(5)[1:3] | list }}
{{ no[1:] }}
{{ sub.items }}
{{ sub['items'] }} {{ sub.name }} {% for k, v in sub.items() %}{{ k }}{% endfor %} {{ sub.get('keys') }} {{ sub | items | list }}
{{ 'a' < 1 }}
{{ 1 in 'a1' }}
{{ none < 1 }}
{{ [1] + (2,) }}
{{ [1] + [2] is sequence }} {{ ([1] + [2])[1] }} {{ [0] * 2 }} {{ 'ab' * -1 }} {{ 'ab' * true }} {{ 7 // -2 }} {{ -7 % 3 }} {{ 7.5 // 2 }} {{ 2 ** -1 }} {{ 6 / 2 }}
{{ l | map('string') }}
{{ l | map('string') | length }}
{{ d.items() }}
{{ d.items() | length }} {{ d.keys() | list }} {{ d.values() | list }} {{ d | dictsort }} {{ d | list }} {{ d.k }} {{ d['q'] is defined }}
{{ l.append(1) }}
{{ d.update({'a': 1}) }}
{{ s.title() }} {{ u.upper() }} {{ 'straße'.upper() }} {{ "it's ok" | title }} {{ s | capitalize }} {{ 'ΑΣ'.lower() }}
{{ '12'.isdigit() }} {{ ''.isdigit() }} {{ 'a1'.isalnum() }} {{ s.find('c') }} {{ s.find('z') }} {{ s.count('') }} {{ 'aaa'.replace('a', 'b', 1) }} {{ 'ab'.replace('', '-') }}
{{ s | trim('ab') }}|{{ sp.strip() }}|{{ sp | trim }}|{{ sp.lstrip(' ') }}|{{ ctrl.strip() | length }}
{{ mix | unique | list }} {{ ls | sort }} {{ ls | sort(case_sensitive=true) }} {{ l | sum }} {{ ls | max }} {{ l | min }} {{ ls | join('-') }} {{ mix | join }}
{{ ld | map(attribute='a') | list }} {{ ld | selectattr('a') | list | length }} {{ ld | map(attribute='b') | map('upper') | join }} {{ ld | sum(attribute='z') }}
{{ 2.5 | round }} {{ 3 | round }} {{ 2.675 | round(2) }} {{ flt | int }} {{ flt | float }} {{ 'x' | int(5) }} {{ -3 | abs }} {{ true + 1 }} {{ 1 == true }} {{ 1 in [1.0] }}
{{ tag | e }} {{ tag | safe }} {{ tag | e | upper }}
{{ missing.a }}
{{ missing }} {{ missing ~ 'a' }} {{ [missing] }} {{ missing | default('x') }} {{ no | default('x') }} {{ e | default('x', true) }} {{ missing == missing }} {{ missing is undefined }}
{% for c in s %}[{{ c }}{{ loop.index }}]{% endfor %} {% for x in missing %}{% else %}none{% endfor %} {% for x in d %}{{ x }}{% endfor %}
{% for x in no %}{% endfor %}
{% set x = l | map('string') %}{{ x | join }}{{ x | join }}
{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, b=tiny) }} {% set ns = namespace(i=0) %}{% for x in l %}{% set ns.i = ns.i + x %}{% endfor %}{{ ns.i }}
{% set x = 0 %}{% set y %}{% set x = 5 %}{{ x }}{% endset %}{{ y }}{{ x }}
{% set x = 0 %}{% filter upper %}{% set x = 5 %}a{{ x }}{% endfilter %}{{ x }}
{% set x = 0 %}{% for i in [] %}{% else %}{% set x = 1 %}{{ x }}{% endfor %}{{ x }}
{% with a = 1 %}{% with a = 2, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }}{% endwith %}
{% macro m(a, b='x') %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(a=3) }}{{ m(1, b=none) }}
{% macro m(a, b='x') %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1, missing) }}
{% macro outer(a) %}{{ inner(a) }}{% endmacro %}{% macro inner(a, b=3) %}{{ a }}{{ b }}{% endmacro %}{{ outer(1) }}
{{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ 1 < 2 in [2] }} {{ 1 == 1.0 != 2 not in [3] }} {{ 1 < (2 < (3 < 4) < 5) < 6 }}
{{ messages | map(attribute='zz', default=none) | list }} {{ '%5s|%-5s|' % ('ab', 'cd') }}
{{ 'a' | truncate(1) }}
{{ [3, 1, 2] | sort }} {{ [true, 0, 2.5, 1] | sort(reverse=true) }}
{{ ['b', 1] | sort }}
{% for m in messages %}{{ loop.cycle() }}{% endfor %}
{{ [[1, [2, {'a': (3,)}]], []] }} {{ range(0, 10, 3) | list }} {{ [1, 2, 3, 4, 5] | batch(2, 'x') | list }}
{{ '\\x41\\u00e9\\101\\t|' }} {{ "a\\'b" }}
{{ '\\v' }}
{{ s.nosuch() }}
{{ s | nosuch }}
{{ s is nosuch }}
{{ lipsum(1) | length > 3 }}
{{ s.encode() }}
""".strip().split("\n")


def case(template, line):
    made = {"template": template, "line": json.dumps(line, ensure_ascii=False)}
    line = copy.deepcopy(line)
    # The tokenizer does so before it renders.
    line["messages"] = [{k: v for k, v in m.items() if v is not None} for m in line["messages"]]
    try:
        text = render_jinja_template([line.pop("messages")], chat_template=template, **line)[0][0]
        made["text"] = re.sub(r" at 0x[0-9a-f]+>", " at 0x>", text)
    except Exception as error:
        made["error"] = f"{type(error).__name__}: {error}"
    return made


def expressions(seed, count):
    maker, cases = Maker(seed), []
    while len(cases) < count:
        template = maker.template()
        made = of_variables(template)
        # Most random expressions fail.
        if "text" in made or maker.random.random() < 0.2:
            cases.append(made)
    return cases


def of_variables(template):
    """The case of a template with the variables in it."""
    variables = {name: value for name, value in VARIABLES.items() if name in template}
    return case(template, {"messages": MESSAGES, **variables})


def constructs():
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for template in CONSTRUCTS:
        # Templates from Windows have other line ends.
        for template in [template.replace("\\n", "\n"), template.replace("\\n", "\r\n")][: 1 + ("}\\n" in template)]:
            for line in LINES.values():
                for prompt in (False, True):
                    yield case(template, {**line, **special, "add_generation_prompt": prompt})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", default=RECORDED)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    args = parser.parse_args()
    if args.record:
        args.seed, args.count = 1, 300
        cases = [*map(of_variables, EXPRESSIONS), *expressions(args.seed, args.count)]
    else:
        cases = [*constructs(), *expressions(args.seed, args.count)]
    with open(args.out, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]\n")
    failing = sum("error" in case for case in cases)
    print(f"{len(cases)} expressions, {args.count} of them of seed {args.seed}, of which Jinja2 refuses {failing}")


if __name__ == "__main__":
    main()
