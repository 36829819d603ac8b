"""A tokenizer with a chat template, and templates in the styles of common models."""

import json
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "header": """{{- bos_token }}
{%- set ns = namespace(system='You help.', first=true) %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}{% endif %}
{{- '<|start|>system<|stop|>\\n\\n' ~ ns.system ~ '<|eot|>' }}
{%- for message in messages %}
    {%- if loop.index0 is even and message.role != 'user' %}{% continue %}{% endif %}
    {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'].strip() + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\\n\\n' }}{% endif %}""",
    "alternating": """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') -}}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "training": """{% macro turn(message) %}[{{ message.role | upper }}]{{ message.content }}{% endmacro %}
{% for message in messages %}
  {% if message.role == 'assistant' %}
{% generation %}{{ turn(message) }}{{ eos_token }}{% endgeneration %}
  {% else %}{{ turn(message) }}{% endif %}
  {% if loop.index > 8 %}{% break %}{% endif %}
{% endfor %}""",
    "json": """{{ messages | tojson(indent=2) }}{{ dict(a=1, b=messages | length) | tojson }}{{ tools is none }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{{ '%s of %d' % (messages[0].content, messages | length) }}{{ messages | map(attribute='role') | join(', ') }}
{{ namespace(n=1).n }}{{ strftime_now('%Y') }}{% for x in range(3) %}{{ x }}{% endfor %}""",
}

# in the forms of published templates: how they read tools, calls, results and the reasoning of a message
TOOL_TEMPLATES = {
    # Hermes and Qwen: JSON in tags; results are parts of a message of the user
    "hermes": """{%- set has_system = messages[0].role == 'system' %}
{%- if tools or has_system %}
    {{- '<|im_start|>system\\n' ~ (messages[0].content if has_system else 'You help.') }}
    {%- if tools %}
        {{- '\\n\\n# Tools\\n\\n<tools>' }}
        {%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
        {{- '\\n</tools>\\n\\nWrite a call as <tool_call>{"name": <name>, "arguments": <object>}</tool_call>.' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.reasoning_content is string %}{{ '\\n<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson)
                ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- endif %}""",
    # Llama 3.1: tools in the first message of the user, one call a message
    "llama": """{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start|>system<|stop|>\\n\\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- system ~ '<|eot|>' }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length == 0 %}{{ raise_exception('no first message of the user') }}{% endif %}
    {{- '<|start|>user<|stop|>\\n\\nCall one of these functions:\\n\\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
    {{- messages[0]['content'] | trim ~ '<|eot|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception('only single calls') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|stop|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>ipython<|stop|>\\n\\n' }}
        {%- if message.content is mapping %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\\n\\n' }}{% endif %}""",
    # Mistral: tools before the last message of the user, calls with ids of nine characters
    "mistral": """{%- if messages[0]['role'] == 'system' %}
    {%- set system, loop_messages = messages[0]['content'], messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is defined and tools is not none and message == user_messages[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != 'return' %}
                    {{- '"' + key + '": ' ~ (val | tojson) }}{% if not loop.last %}{{ ', ' }}{% endif %}
                {%- endfor %}
                {{- '}}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' }}{% endif %}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message['content']
            + '[/INST]' }}
    {%- elif message['tool_calls'] is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {%- if not call.id is defined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}
            {%- endif %}
            {{- out[:-1] + ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}
            {%- else %}{{ ']' + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id
            + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('an unknown role') }}{% endif %}
{%- endfor %}""",
    # gpt-oss: the effort is a line of the system message; tools as text; thoughts of the last message
    "harmony": """{%- macro listed(tools) %}{% for tool in tools %}{{ '// ' + (tool.function.description or '')
            + '\\ntype ' + tool.function.name }}
        {%- for name, of in (tool.function.parameters or {}).properties | default({}) | items %}
            {{- ' ' + name + ': ' + of.type | string }}{% endfor %}{{ '\\n' }}{% endfor %}{% endmacro %}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort if reasoning_effort is defined else 'medium')
    + '<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>' + listed(tools) + '<|end|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined %}
        {%- if message.thinking %}{{ '<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
        {%- for call in message.tool_calls %}{{ '<|call|>' + call.function.name + (call.function.arguments | tojson) }}
        {%- endfor %}
    {%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
}


def chat_folder(folder: Path, template: str | None = CHATML) -> Path:
    """A tokenizer of bytes with the special tokens of ChatML, its chat template and its list of end tokens.

    <|endoftext|> has the id 0, <|im_start|> 1, <|im_end|> 2, and the bytes follow.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: i for i, name in enumerate([*SPECIAL, *characters])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    made.add_special_tokens(list(SPECIAL))
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
