"""The chat templates of published models: they give the text of the model's own for chats without tools.

Around the answers stands {% generation %}, which most models publish without. `unmarked` removes it.
"""

_ALTERNATES = """{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception(
'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"""

MARKED = {
    "chatml": """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "llama3": """{% for message in messages %}
{%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{%- set content = message['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{{ bos_token }}{% endif %}{{ head }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ content }}{% endgeneration %}
{%- else %}{{ content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}"""
    + _ALTERNATES
    + """{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' }}{% set content = message['content'] | trim + '<end_of_turn>\\n' %}
{%- if role == 'model' %}{% generation %}{{ content }}{% endgeneration %}{% else %}{{ content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "mistral": """{{ bos_token }}{% for message in messages %}"""
    + _ALTERNATES
    + """{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}{% generation %}{{ message['content'] + eos_token + '\\n' }}{% endgeneration %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "phi3": """{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>\\n' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}
{%- else %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}""",
    "qwen2.5": """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' }}{% generation %}
            {{- message.content + '<|im_end|>' + '\\n' }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "smollm": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "vicuna": """{% if messages[0]['role'] == 'system' %}
{%- set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}
{%- set loop_messages = messages %}{% set system = 'A chat between a curious user and an artificial intelligence '
+ 'assistant. The assistant gives helpful, detailed, and polite answers to the user\\'s questions.' %}{% endif %}
{{- bos_token + system }}{% for message in loop_messages %}
{%- if message['role'] == 'user' %}{{ ' USER: ' + message['content'].strip() }}
{%- else %}{{ ' ASSISTANT:' }}{% generation %}
{{- ' ' + message['content'].strip() + eos_token }}{% endgeneration %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}""",
    "deepseek_v2": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{{- bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}{{ 'Assistant:' }}{% generation %}
{{- ' ' + message['content'] + eos_token }}{% endgeneration %}
{%- elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}""",
}

# their text of an early answer changes when later messages follow: they drop the thoughts of earlier turns
FORGETFUL = {
    "qwen3": """{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.found = true %}{% set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thoughts = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
            if '</think>' in message.content else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "deepseek_r1": """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' %}{% set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}""",
}


def unmarked(template: str) -> str:
    """The template as it is published. White space around its tags is the same."""
    return template.replace("{% generation %}", "{% if true %}").replace("{% endgeneration %}", "{% endif %}")
