"""The one model that every engine runs, in each engine's format: the bf16 weights that magicdec's own engine has."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from magicdec.builder.checkpoints.fetch import fetch_smollm2
from magicdec.builder.checkpoints.source import TensorSource, open_source

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def huggingface_model(engine: Path, cache: Path, output: Path) -> Path:
    """A Hugging Face checkpoint in bf16. engine: magicdec's, for the tokenizer; cache: where the source is kept."""
    if (output / "config.json").is_file():
        return output
    output.mkdir(parents=True, exist_ok=True)
    source = open_source(fetch_smollm2(cache))
    try:
        tensors = {name: source.read(name, (0, shape[0])).to(torch.bfloat16) for name, shape in source.shapes.items()}
        save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
        for name in TOKENIZER_FILES:
            shutil.copyfile(engine / "target" / name, output / name)
        (output / "config.json").write_text(json.dumps(_config(source), indent=1))  # last: it marks the whole
    finally:
        source.close()
    return output


def gguf_model(cache: Path, output: Path) -> Path:
    """A GGUF file with the same numbers in bf16; norms stay float32, as llama.cpp wants them."""
    if output.is_file():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(fetch_smollm2(cache))
    partial = output.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, arch=reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(output)
    return output


def _config(source: TensorSource) -> dict[str, object]:
    spec = source.spec
    assert spec.family == "llama", "the demo's model is a LLaMA"
    assert spec.rotary_scaling is None, "the demo's model has plain rotary embeddings"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.norm_epsilon,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rotary_base,
        "rope_parameters": {"rope_theta": spec.rotary_base, "rope_type": "default"},
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": list(spec.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
