"""Reading Hugging Face directories: shards, slices, and a clear error for every kind of damage."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.builder.checkpoints.source import open_source
from magicdec.errors import CheckpointError
from tests.support.tiny_models import write_tiny_checkpoint

Q0 = "model.layers.0.self_attn.q_proj.weight"


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_slices_of_shards_are_the_tensors_written(tmp_path: Path) -> None:
    whole = load_file(write_tiny_checkpoint(tmp_path / "one") / "model.safetensors")
    source = open_source(write_tiny_checkpoint(tmp_path / "three", shards=3))
    assert set(source.shapes) == set(whole)
    for name, shape in source.shapes.items():
        assert torch.equal(source.read(name, (0, shape[0])), whole[name])
    assert torch.equal(source.read(Q0, (8, 16), (4, 12)), whole[Q0][8:16, 4:12])
    source.close()


def test_end_tokens_come_from_generation_config_first(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    assert open_source(directory).spec.eos_token_ids == (2, 4)
    (directory / "generation_config.json").unlink()
    assert open_source(directory).spec.eos_token_ids == (2,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_is_refused_by_name_and_never_opened(tmp_path: Path, name: str) -> None:
    directory = write_tiny_checkpoint(tmp_path)
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(b"\x80\x02cos\nabort\n(tR.")  # would end the process if it were unpickled
    with pytest.raises(CheckpointError, match=rf"{name}, a pickle, which can run any code.*save_pretrained"):
        open_source(directory)
    with pytest.raises(CheckpointError, match="is a pickle"):
        open_source(directory / name)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_safetensors_are_named_with_the_mend(tmp_path: Path, keep: int) -> None:
    directory = write_tiny_checkpoint(tmp_path)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or damaged: .*Copy or download"):
        open_source(directory)


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path, shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: truncated"):
        open_source(directory)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing, though"):
        open_source(directory)


def test_shards_without_index_are_refused(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path, shards=2)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        open_source(directory)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 3])
def test_index_cannot_lead_out_of_the_directory(tmp_path: Path, name: object) -> None:
    directory = write_tiny_checkpoint(tmp_path, shards=2)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q0: name}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_source(directory)


def test_missing_and_wrong_tensors_are_named(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != Q0}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {Q0} is missing"):
        open_source(directory)
    save_file(tensors | {Q0: torch.zeros(3, 32)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {Q0} has shape \[3, 32\].*calls for \[32, 32\]"):
        open_source(directory)
    save_file(tensors | {Q0: tensors[Q0].to(torch.int8)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {Q0} is of dtype I8"):
        open_source(directory)


def test_a_tensor_that_nobody_would_use_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    bias = "model.layers.0.self_attn.o_proj.bias"
    save_file(tensors | {bias: torch.zeros(32)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {bias} \(of 1 such\) is not part of a llama model"):
        open_source(directory)


def test_redundant_tensors_of_old_exports_are_known(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path, tied=True)
    tensors = load_file(directory / "model.safetensors")
    redundant = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": torch.zeros(128, 32)}
    save_file(tensors | redundant, directory / "model.safetensors")
    assert "lm_head.weight" not in open_source(directory).shapes


def test_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path, tied=True)
    edit_config(directory, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        open_source(directory)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        open_source(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("x")
    with pytest.raises(CheckpointError, match=r"not a \.txt file"):
        open_source(text)


def test_missing_and_damaged_configuration(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model")
    for text in ("{", "[]", ""):
        (directory / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            open_source(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_source(directory)
    (directory / "model.safetensors").unlink()
    shutil.copy(directory / "tokenizer.json", directory / "config.json")
    with pytest.raises(CheckpointError, match="holds no safetensors weights"):
        open_source(directory)
