"""Chat templates that define tools, in the formats of common model families. Knows no test."""

# ruff: noqa: E501

HERMES = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{{ '\\nFunctions:\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
    '{{ \'\\n</tools>\\nCall as <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n\' }}{% endif %}'
    "{% for message in messages %}{% if message.role == 'system' and tools %}{% continue %}{% endif %}"
    "{% if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + "
    "'\\n</tool_response><|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.name %}{{ '(' + message.name + ') ' }}{% endif %}{{ message.content }}"
    '{% for call in message.tool_calls %}{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    '{{ bos_token }}{% if tools %}{{ \'<|start_header_id|>system<|end_header_id|>\\n\\nAnswer with {"name": NAME, '
    "\"parameters\": OBJECT}.\\n' }}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{{ '<|eot_id|>' }}"
    "{% endif %}{% for message in messages %}{% if 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\\n\\n<|python_tag|>{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments | tojson }}{{ '}<|eom_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}"
    "{{ message.content | trim }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{% if loop.last and tools %}"
    "{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' + message.content + '[/INST]' }}{% elif message.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{% for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% endfor %}{{ ']' + eos_token }}{% elif message.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}{% else %}{{ message.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
MISTRAL_ARGS = (
    "{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}"
    "{% elif message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "mistral-args": MISTRAL_ARGS}
