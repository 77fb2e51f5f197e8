"""The tokenizer and chat template of the quick start's model.

Words, single digits, "_" and runs of punctuation are cut apart before anything is merged, so a name is the
same tokens in an instruction, in a tool call's JSON and in a tool's output: copying it is copying tokens. The
fixed strings of the format are one token each, which keeps an episode near 25 sampled tokens. Any other text
falls back to bytes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from agent.harness import SYSTEM
from kinds import WORDS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = [PAD, START, EOS]
# As in Qwen's tokenizers these are single tokens but not "special": decoding keeps them.
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
FIXED = [
    SYSTEM,
    '{"name": "bash", "arguments": {"cmd": "',
    '{"name": "write_file", "arguments": {"path": "',
    '", "content": "',
    "assistant\n",
    "system\n",
    "user\n",
    "\\n    return ",
]
PIECES = [
    *map(re.escape, FIXED),
    r"\.[a-z]+",
    r"\\n",
    "[A-Za-z]+",
    "[0-9]",
    "_",
    r"\n",
    r"[^A-Za-z0-9_\n\\]+",
    r"\\",
]
VOCABULARY = 1000  # at most; training ends earlier, when nothing is left to merge

# ChatML with Hermes tool calls. `tools` is ignored: the system message names them in one token. Arguments may
# be an object or, as OpenAI's API has them, a string of JSON.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer(corpus: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer learned from the corpus; every word that tasks draw from is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(PIECES)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=CONTROL + MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus, *WORDS], trainer)
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(state))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer wants them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
