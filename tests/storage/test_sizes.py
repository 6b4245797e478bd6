"""Files that are larger than what is moved at a time give the same bytes, checksums and rows."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from titan_linear.storage import hf_io, hf_writing, step_folders
from titan_linear.storage.hf_io import Folder, RowReader, read_header

TENSORS = {
    "matrix": torch.arange(35.0).view(7, 5),
    "experts": torch.arange(84, dtype=torch.bfloat16).view(3, 4, 7),
}


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return Folder(tmp_path, {}, read_header(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("block", [1, 50, 64 << 20])
@pytest.mark.parametrize("name", TENSORS)
def test_rows_of_a_folders_tensor_come_in_blocks(monkeypatch, folder, name, block):
    """Any rows, whole slices of the first dimension or not, in order and each once."""
    monkeypatch.setattr(hf_io, "BLOCK", block)
    rows = TENSORS[name].flatten(0, -2)
    reader = RowReader(folder)
    for start, stop in ((0, len(rows)), (1, 6), (5, 6), (2, 2)):
        parts = list(reader.rows(folder.tensors[name], start, stop, rows.shape[1]))
        assert torch.equal(torch.cat([rows[:0], *parts]), rows[start:stop])
        assert len(parts) <= 1 or block < 64 << 20


def test_checksums_and_copies_do_not_depend_on_the_block(monkeypatch, folder, tmp_path):
    file = tmp_path / "model.safetensors"
    fingerprint, sums = folder.fingerprint, step_folders.inspect(file)
    target = tmp_path / "copy.safetensors"
    target.write_bytes(bytes(file.stat().st_size))
    copied = Folder(tmp_path, {}, folder.tensors)
    for module in (hf_io, step_folders):
        monkeypatch.setattr(module, "BLOCK", 7)
    assert copied.fingerprint == fingerprint and step_folders.inspect(file) == sums
    for tensor in folder.tensors.values():
        hf_writing._copy_bytes(tensor, replace(tensor, file=target))
        kept = slice(tensor.begin, tensor.end)
        assert target.read_bytes()[kept] == file.read_bytes()[kept]
