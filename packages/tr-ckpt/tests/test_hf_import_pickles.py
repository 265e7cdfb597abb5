"""Pickles in the files of other programs: read without executing anything, and compared with their checksums."""

import copy
import io
import json
import pickle
import random
import zipfile
from collections import Counter, OrderedDict

import ckpt_foreign
import pytest
import torch
from ckpt_foreign import Payload, View
from ckpt_parts import same

from tr_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, hf_import
from tr_ckpt.hf_import import state_files


def write_plain(value, path):
    path.write_bytes(pickle.dumps(value, protocol=2))


def write_old(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)


def write_nested(value, path):
    torch.save(OrderedDict(a=torch.zeros(2), b=[{"c": value}]), path)


FORMS = [torch.save, write_plain, write_old, write_nested]


def test_the_payload_of_these_tests_works(mark, tmp_path):
    torch.save(Payload(mark), tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert mark.exists()
    mark.rmdir()


# The part that is read of a file which no whole run has; the others are read by a run that resumes.
PART_OF = {
    "scaler.pt": "scaler", "pytorch_model.bin": "model", "pytorch_model-00001-of-00001.bin": "model",
    "adapter_model.bin": "adapter_model",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "trainer_state.json", *PART_OF]
)
def test_a_malicious_pickle_in_any_file_executes_nothing(file, form, left, mark):
    if file.endswith(".bin"):
        (left / "model.safetensors").unlink()
    if "-of-" in file:
        (left / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"first.weight": file}}))
    form(Payload(mark), left / file)
    parts = {PART_OF[file]: ckpt_foreign.Place()} if file in PART_OF else ckpt_foreign.make()
    untouched = copy.deepcopy(parts["model"].state_dict()) if file not in PART_OF else {}
    with pytest.raises(CheckpointError, match=file):
        Checkpointer(left.parent / "ours").restore(parts, left)
    assert all(torch.equal(parts["model"].state_dict()[name], value) for name, value in untouched.items())
    with pytest.raises(CheckpointError, match=file):
        hf_import.convert(left, left.parent / "converted")
    assert not (left.parent / "converted").exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_malicious_pickle_in_the_random_states_of_a_rank_executes_nothing(rank, form, left, mark):
    (left / "rng_state.pth").rename(left / "rng_state_0.pth")
    torch.save(ckpt_foreign.random_states(), left / "rng_state_1.pth")
    form(Payload(mark), left / f"rng_state_{rank}.pth")
    with pytest.raises(CheckpointError, match=f"rng_state_{rank}.pth"):
        hf_import.read(left).random_states[rank]


@pytest.mark.parametrize("form", FORMS)
def test_the_pickled_arguments_are_never_read(form, left, mark):
    form(Payload(mark), left / "training_args.bin")
    parts = ckpt_foreign.make()
    assert Checkpointer(left.parent / "ours").restore(parts, left) == 3
    folder = hf_import.convert(left, left.parent / "converted")
    assert not (folder / "training_args.bin").exists()
    assert any("training_args.bin is a pickle" in note for note in hf_import.read(left).notes)


def test_a_refused_name_is_in_the_message(left, mark):
    torch.save(Payload(mark), left / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer.pt names posix.mkdir, which is neither tensor, number nor"):
        hf_import.read(left).states["optimizer"]


PROGRAMS = {
    "a name of builtins": b"cbuiltins\neval\n(S'1'\ntR.",
    "a name inside an allowed one": b"ccollections\nOrderedDict.fromkeys\n(]tR.",
    "a module that is not imported": b"cthis\ns\n.",
    "an extension": b"\x82\x01.",
    "an instance by name": b"(S'1'\nios\nsystem\n.",
    "an object by class": b"(cos\nsystem\nS'1'\no.",
    "a name from the stack": b"\x8c\x02os\x8c\x06system\x93.",
    "a call of a dtype": b"ctorch\nfloat32\n(tR.",
    "state for a tensor": b"ctorch._utils\n_rebuild_parameter\n(K\x01tR}b.",
    "a storage of another kind": b"(S'storage'\nNS'0'\nS'cpu'\nK\x01tQ.",
    "something else outside": b"S'module'\nQ.",
    "an array of objects": b"cnumpy\ndtype\n(S'O8'\nK\x00K\x01tR.",
    "nothing": b"",
    "a pickle that is cut off": pickle.dumps([1, 2, 3], protocol=2)[:-3],
    "a list for ever": b"]q\x00h\x00a.",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_what_is_no_plain_state_is_refused(program, tmp_path):
    with pytest.raises(CheckpointError):
        ckpt_foreign.read_program(program, tmp_path)


def plain_state():
    weight = torch.randn(4, 6)
    return {
        "weight": weight,
        "transposed": weight.t(),
        "row": weight[1],
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "bfloat16": torch.randn(3).bfloat16(),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "module": torch.nn.Linear(2, 2).state_dict(),
        "plain": (1, 2**70, 0.1, float("inf"), None, True, "text", b"bytes", [1, {2: "x"}]),
        "counter": Counter("aab"),
        "kinds": [torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.device("cuda", 1)],
    }


def test_plain_state_is_read_as_torch_reads_it(tmp_path):
    state = plain_state()
    torch.save(state, tmp_path / "x.pt")
    read = state_files.read_archive(tmp_path / "x.pt")
    expected = torch.load(tmp_path / "x.pt", weights_only=True)
    assert same({**expected, "parameter": expected["parameter"].detach()}, read)
    assert read["module"]._metadata == state["module"]._metadata
    read["weight"].zero_()  # tensors that shared memory do again
    assert not read["transposed"].any()
    assert not read["row"].any()


def test_values_of_numpy_become_tensors_and_numbers_whatever_its_version(tmp_path):
    np = pytest.importorskip("numpy")
    value = {
        "words": np.arange(5, dtype=np.uint32),
        "matrix": np.ones((2, 3)),
        "rate": np.float64(0.1),
        "n": np.int64(-7),
    }
    written = pickle.dumps(value, protocol=2)
    for core in (b"numpy.core.", b"numpy._core."):
        for other in (b"numpy.core.", b"numpy._core."):
            program = written.replace(other, core)
            read = ckpt_foreign.read_program(program, tmp_path)
            assert read["words"].tolist() == [0, 1, 2, 3, 4]
            assert read["words"].dtype == torch.uint32
            assert torch.equal(read["matrix"], torch.ones(2, 3, dtype=torch.float64))
            assert (read["rate"], read["n"]) == (0.1, -7)
            assert type(read["rate"]) is float


@pytest.mark.parametrize("kind", [object, "U3"])
def test_arrays_that_are_not_of_numbers_are_refused(kind, tmp_path):
    np = pytest.importorskip("numpy")
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        ckpt_foreign.read_program(pickle.dumps(np.array([1, 2]).astype(kind), protocol=2), tmp_path)


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (5,), (1,)), (1, (4,), (1,)), (0, (2, 2), (3, 1)), (2**62, (1,), (1,)), (-1, (1,), (1,)), (0, (2,), (-1,))],
)
def test_a_tensor_that_reaches_beyond_its_numbers_is_damage(offset, size, stride, tmp_path):
    torch.save(View(size, stride, offset), tmp_path / "x.pt")
    with pytest.raises(DamagedCheckpointError, match="x.pt"):
        state_files.read_archive(tmp_path / "x.pt")


def small(tmp_path):
    torch.manual_seed(0)
    state = {"weight": torch.randn(3), "step": 5, "name": "x", "rng": random.Random(0).getstate()[:1]}
    torch.save(state, tmp_path / "x.pt")
    return tmp_path / "x.pt", state


def read_or_none(path):
    try:
        return state_files.read_archive(path)
    except CheckpointError:
        return None


def test_no_flipped_byte_of_a_file_is_taken_for_state(tmp_path):
    path, state = small(tmp_path)
    whole, detected = path.read_bytes(), 0
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0x55]) + whole[index + 1 :])
        read = read_or_none(path)
        detected += read is None
        assert read is None or same(state, read), index  # padding, dates, and records that hold no state
    assert detected > len(whole) // 4


def test_a_file_that_is_cut_anywhere_is_damage(tmp_path):
    path, _ = small(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpointError, match="x.pt"):
            state_files.read_archive(path)


def test_a_zip_archive_of_something_else_is_refused(tmp_path):

    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "text")
    with pytest.raises(DamagedCheckpointError, match=r"x.pt cannot be read: it is a zip archive, but not one of torch"):
        state_files.read_archive(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", pickle.dumps([0] * 100, protocol=2))
    with pytest.raises(DamagedCheckpointError, match="compressed"):
        state_files.read_archive(path)


def test_numbers_with_the_high_byte_first_are_refused(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()

    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(tmp_path / "y.pt", "w") as target:
        for entry in source.infolist():
            content = b"big" if entry.filename.endswith("byteorder") else source.read(entry)
            target.writestr(entry.filename, content)
    with pytest.raises(CheckpointError, match="big"):
        state_files.read_archive(tmp_path / "y.pt")
