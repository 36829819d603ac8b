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
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}{% endif %}
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
