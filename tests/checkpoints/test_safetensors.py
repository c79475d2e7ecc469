import json

import ml_dtypes
import numpy as np
import pytest

from checkpoints import safetensors
from checkpoints.safetensors import DTYPES, SafetensorsFile, open_folder
from checkpoints.source import CheckpointError

ONE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_dtype_survives_a_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {}
    for code, dtype in DTYPES.items():
        data = rng.integers(0, 2 if code == "BOOL" else 256, (3, 5 * dtype.itemsize), dtype=np.uint8)
        tensors[code] = data.view(dtype)
    tensors["scalar"] = np.array(1.5, np.float32)
    tensors["empty"] = np.empty((0, 4), np.float16)
    safetensors.write(tmp_path / "x.safetensors", tensors, {"format": "np"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.shapes() == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        found = file.read(name)
        assert (found.dtype, found.shape, found.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())


def test_the_format_is_read_and_written_byte_by_byte_as_published(tmp_path):
    header = b'{"a":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
    file = SafetensorsFile(write_raw(tmp_path / "x", header, b"\x01\x00\xff\xff"))
    assert file.read("a").tolist() == [1, -1]
    safetensors.write(tmp_path / "y", {"b": np.array([1.0], ml_dtypes.bfloat16)})
    written = (tmp_path / "y").read_bytes()
    length = int.from_bytes(written[:8], "little")
    assert json.loads(written[8 : 8 + length]) == {"b": entry("BF16", [1], [0, 2])}
    assert written[8 + length :] == b"\x80\x3f"


def test_a_read_is_a_read_only_view_of_the_file(tmp_path):
    safetensors.write(tmp_path / "x", ONE)
    array = SafetensorsFile(tmp_path / "x").read("a")
    assert not array.flags.writeable
    assert not array.flags.owndata


def test_a_dtype_that_the_format_lacks_is_refused_on_writing(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor 'c' is complex64; safetensors holds F64, F32"):
        safetensors.write(tmp_path / "x", {"c": np.zeros(2, np.complex64)})


DAMAGE = {
    "short": (b"\x00\x01", r"2 bytes, too short"),
    "long header": ((200_000_000).to_bytes(8, "little"), r"claims 200000000 bytes; at most 100000000"),
    "cut header": ((50).to_bytes(8, "little") + b"{", r"claims 50 bytes, but the file ends after 9"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_start_is_refused_with_its_figures(case, tmp_path):
    content, message = DAMAGE[case]
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: .*" + message):
        SafetensorsFile(tmp_path / "x.safetensors")


HEADERS = {
    "not json": (b"{]", r"the header is not JSON"),
    "not text": (b"\xff\xfe", r"the header is not JSON"),
    "deep": (b"[" * 100_000, r"the header is not JSON"),
    "list": ([1], r"the header is a list, not an object"),
    "entry": ({"a": 3}, r"tensor 'a': its entry is 3, not an object"),
    "dtype": ({"a": entry("F3")}, r"tensor 'a': dtype 'F3' is not supported; known: F64, F32"),
    "shape": ({"a": entry(shape=[-2])}, r"tensor 'a': shape \[-2\] is not a list of sizes"),
    "bool shape": ({"a": entry(shape=[True])}, r"shape \[True\] is not a list of sizes"),
    "offsets": ({"a": entry(offsets=[0])}, r"data_offsets \[0\] is not a pair of sizes"),
    "span": ({"a": entry(offsets=[0, 4])}, r"F32 \[2\] takes 8 bytes, but data_offsets \[0, 4\] span 4"),
    "overlap": (
        {"a": entry(), "b": entry(offsets=[4, 12])},
        r"tensor 'b' starts at byte \d+ and overlaps tensor 'a', which ends at \d+",
    ),
    "gap": ({"a": entry(offsets=[4, 12])}, r"tensor 'a' starts at byte \d+ and leaves a gap after the header"),
    "truncated": (
        {"a": entry(shape=[4], offsets=[0, 16])},
        r"truncated: tensor 'a' ends at byte \d+, but the file ends after \d+",
    ),
    "trailing": ({}, r"12 bytes follow the last tensor"),
    "duplicate": (
        b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}",
        r"the header names \['a'\] more than once",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_bad_header_is_refused_with_the_file_and_the_value(case, tmp_path):
    header, message = HEADERS[case]
    path = write_raw(tmp_path / "x.safetensors", header, bytes(12))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: .*" + message):
        SafetensorsFile(path)


def test_an_absent_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone: cannot be read \(No such file"):
        SafetensorsFile(tmp_path / "gone")


def test_a_changed_byte_never_gives_anything_but_a_tensor_or_a_refusal(tmp_path):
    safetensors.write(tmp_path / "x", {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.int8)})
    content = (tmp_path / "x").read_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(600):
        damaged = bytearray(content)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] = rng.choice([*b'0123456789[]{}",:-', *range(256)])
        if rng.random() < 0.2:
            damaged = damaged[: rng.integers(len(damaged))]
        (tmp_path / "y").write_bytes(damaged)
        try:
            file = SafetensorsFile(tmp_path / "y")
        except CheckpointError:
            refused += 1
        else:
            for name, shape in file.shapes().items():
                assert file.read(name).shape == shape
    assert refused > 300


def shards(folder, *names):
    for i, name in enumerate(names):
        safetensors.write(folder / name, {f"t{i}": np.full(2, i, np.float32)})


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_is_the_whole_checkpoint(tmp_path):
    shards(tmp_path, "model.safetensors", "other.safetensors")
    assert set(open_folder(tmp_path).shapes()) == {"t0"}


def test_the_index_says_which_files_belong_together(tmp_path):
    shards(tmp_path, "a.safetensors", "b.safetensors", "adapter.safetensors")
    index(tmp_path, {"t0": "a.safetensors", "t1": "b.safetensors"})
    source = open_folder(tmp_path)
    assert source.shapes() == {"t0": (2,), "t1": (2,)}
    assert source.read("t1").tolist() == [1, 1]


def test_shards_without_an_index_are_one_checkpoint(tmp_path):
    shards(tmp_path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "adapter.safetensors")
    assert set(open_folder(tmp_path).shapes()) == {"t0", "t1"}


def test_consolidated_files_count_only_where_nothing_else_is_there(tmp_path):
    shards(tmp_path, "consolidated.safetensors")
    assert set(open_folder(tmp_path).shapes()) == {"t0"}
    safetensors.write(tmp_path / "weights.safetensors", ONE)
    assert set(open_folder(tmp_path).shapes()) == {"a"}


def test_links_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    safetensors.write(tmp_path / "blobs" / "123", ONE)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "123")
    assert open_folder(tmp_path).read("a").tolist() == ONE["a"].tolist()


def test_a_folder_without_safetensors_has_no_source(tmp_path):
    assert open_folder(tmp_path) is None


def test_a_shard_that_is_missing_without_an_index_is_noticed_by_its_count(tmp_path):
    shards(tmp_path, "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"2 safetensors files .* that count to \[3\]; a shard is missing"):
        open_folder(tmp_path)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path):
    shards(tmp_path, "a.safetensors")
    index(tmp_path, {"t0": "a.safetensors", "t1": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"index\.json: 1 of 2 files are missing: b\.safetensors"):
        open_folder(tmp_path)


def test_an_index_that_names_a_tensor_that_is_not_there_is_refused(tmp_path):
    shards(tmp_path, "a.safetensors")
    index(tmp_path, {"t0": "a.safetensors", "t9": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"places tensor 't9' in a\.safetensors, which does not hold it"):
        open_folder(tmp_path)


def test_an_index_cannot_name_files_outside_its_folder(tmp_path):
    index(tmp_path, {"t0": "../a.safetensors"})
    with pytest.raises(CheckpointError, match=r"names '\.\./a\.safetensors', which is not a file of this folder"):
        open_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: not an index of shards"):
        open_folder(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    safetensors.write(tmp_path / "a.safetensors", ONE)
    safetensors.write(tmp_path / "b.safetensors", ONE)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor 'a' is also in a\.safetensors"):
        open_folder(tmp_path)
