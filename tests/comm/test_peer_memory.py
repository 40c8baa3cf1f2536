"""The contract of memory that two processes share: the same battery on host memory and on the GPU's driver, which is
made of host memory here. What is wrong is named in time at both ends, and nothing stays open or mapped."""

import gc
import os
import signal
import socket
import struct
import threading
import time

import pytest
import torch

from afserve.comm.peer_memory.cuda_driver import CudaDriver
from afserve.comm.peer_memory.described import bytes_at
from afserve.comm.peer_memory.driver import MemoryRefused
from afserve.comm.peer_memory.ipc_domain import IpcDomain
from tests.comm.begun import FORKED
from tests.comm.fake_libcuda import STEP, FakeCuda
from tests.comm.host_driver import HostDriver
from tests.open_files import left_open, open_files

CPU = torch.device("cpu")
SECONDS, LONG = 0.3, 30.0
SIZE = 3 * 4096 + 8


def gpu(**how):
    return CudaDriver(CPU, FakeCuda(**how))


DRIVERS = pytest.mark.parametrize("driver", [HostDriver, gpu], ids=["host", "cuda"])


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


@pytest.fixture(autouse=True)
def nothing_stays_open(request, nothing_else_collected):
    before = open_files()
    yield
    forked = request.node.get_closest_marker("process")  # which has files of its own
    assert forked or not left_open(before)


def both(pair, one, other, sizes=(SIZE, SIZE)):
    """What both ends got, or the text of what they raised."""
    got = [None, None]

    def run(end, driver):
        try:
            got[end] = IpcDomain(driver).share(pair[end], sizes[end], LONG)
        except MemoryRefused as error:
            got[end] = str(error)

    threads = [threading.Thread(target=run, args=of) for of in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    return got


@DRIVERS
def test_each_end_reads_what_the_other_writes(pair, driver):
    one, other = both(pair, driver(), driver())
    for mine_B, theirs_B in ((one.mine_B, other.theirs_B), (other.mine_B, one.theirs_B)):
        assert mine_B.shape == theirs_B.shape == (SIZE,) and not mine_B.any() and not theirs_B.any()
        theirs_B[5:SIZE] = 7
        assert mine_B[4:6].tolist() == [0, 7] and mine_B[-1] == 7
        mine_B.zero_()


def echo(connection, driver):
    shared = IpcDomain(driver()).share(connection, SIZE, LONG)
    shared.theirs_B[0] = 41
    while not shared.mine_B[0]:
        time.sleep(0.001)
    shared.theirs_B[1] = shared.mine_B[0] + 1
    signal.pause()


@pytest.mark.process
@DRIVERS
def test_processes_share_memory_that_outlives_the_one_that_is_killed(pair, driver):
    process = FORKED.Process(target=echo, args=(pair[1], driver), daemon=True)
    process.start()
    shared = IpcDomain(driver()).share(pair[0], SIZE, LONG)
    shared.theirs_B[0] = 8
    until = time.monotonic() + LONG
    while not shared.mine_B[1] and time.monotonic() < until:
        time.sleep(0.001)
    process.kill()
    process.join()
    assert shared.mine_B[:2].tolist() == [41, 9] and shared.theirs_B[0] == 8
    shared.theirs_B[2] = 1  # goes nowhere, and hurts nobody


@DRIVERS
def test_a_late_peer_is_named_in_time(pair, driver):
    with pytest.raises(MemoryRefused, match=r"did not share its memory within 0\.3 s; is it stopped"):
        IpcDomain(driver()).share(pair[0], SIZE, SECONDS)


@DRIVERS
def test_a_peer_that_hands_over_and_then_says_nothing_is_late_too(pair, driver):
    made = HostDriver().make(SIZE)
    name = driver().name.encode()
    socket.send_fds(pair[1], [struct.pack("<8s8sQQ", b"afs-mem1", name, SIZE, SIZE)], [made.file])
    os.close(made.file)
    with pytest.raises(MemoryRefused, match=r"within 0\.3 s"):
        IpcDomain(driver()).share(pair[0], SIZE, SECONDS)


@pytest.mark.parametrize("said", [b"", b"\1" * 20, b"afs-mem1"], ids=["nothing", "a part", "its name"])
def test_a_peer_that_hangs_up_is_named(pair, said):
    pair[1].sendall(said)
    pair[1].close()
    with pytest.raises(MemoryRefused, match=r"hung up before both had|its connection has ended"):
        IpcDomain(HostDriver()).share(pair[0], SIZE, LONG)


def test_a_stranger_is_named(pair):
    pair[1].sendall(b"GET / HTTP/1.1\r\nHost: here\r\nAccept: */*\r\n\r\n")
    with pytest.raises(MemoryRefused, match="it says b'GET / HT' in place of an offer of memory"):
        IpcDomain(HostDriver()).share(pair[0], SIZE, LONG)


def offer(pair, files, size=SIZE, whole=SIZE, name=b"host"):
    head = struct.pack("<8s8sQQ", b"afs-mem1", name, size, whole)
    if files:
        socket.send_fds(pair[1], [head], files)
    else:
        pair[1].sendall(head)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("a pipe", "what came is no memory"),
        ("a file that may shrink", "not 12296 that cannot shrink"),
        ("too short", "what came has 4096 bytes"),
        ("a wrong sum", "it made 1 bytes of memory where 12296 are shared"),
    ],
)
def test_what_is_not_the_memory_that_was_promised_is_refused_and_the_peer_is_told(pair, how, why):
    whole, made = SIZE, HostDriver().make(4096 if how == "too short" else SIZE)
    file = made.file
    if how == "a pipe":
        file, other = os.pipe()
        os.close(other)
    elif how == "a file that may shrink":
        file = os.memfd_create("loose")
        os.ftruncate(file, SIZE)
    elif how == "a wrong sum":
        whole = 1
    offer(pair, [file], whole=whole)
    with pytest.raises(MemoryRefused, match=why):
        IpcDomain(HostDriver()).share(pair[0], SIZE, LONG)
    pair[0].close()
    told = b"".join(iter(lambda: pair[1].recv(4096), b""))
    assert why[:20].encode() in told
    for one in {file, made.file}:
        os.close(one)


def test_an_offer_without_memory_and_one_with_too_much(pair):
    made = HostDriver().make(SIZE)
    offer(pair, [made.file] * 3)
    pair[1].sendall(b"\0\0\0")
    shared = IpcDomain(HostDriver()).share(pair[0], SIZE, LONG)
    shared.theirs_B[0] = 3
    assert made.memory_B[0] == 3
    os.close(made.file)
    offer(pair, [])
    pair[1].sendall(b"\0\0\0")
    with pytest.raises(MemoryRefused, match="no memory came with its offer"):
        IpcDomain(HostDriver()).share(pair[0], SIZE, LONG)


def test_ends_that_disagree_both_say_so(pair):
    for sizes, drivers in (
        ((SIZE, SIZE + 1), (HostDriver(), HostDriver())),
        ((SIZE, SIZE), (HostDriver(), gpu())),
    ):
        here, there = socket.socketpair()
        with here, there:
            one, other = both((here, there), *drivers, sizes)
        assert one.startswith("it shares") and other.startswith("it shares")
        assert f"and this end {SIZE} of host" in one


MAKES = ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemsetD8_v2"]
OPENS = ["cuMemImportFromShareableHandle"]


@pytest.mark.parametrize("name", [*MAKES, *OPENS, "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_driver_that_cannot_says_what_and_leaves_nothing_behind(pair, name):
    """On the GPU of one end. The other one is told."""
    broken, fine = gpu(fails={name: 1}), gpu()
    one, other = both(pair, broken, fine)
    assert one == f"cpu: {name} says CUDA_ERROR_INVALID_VALUE"
    assert other == f"the other end cannot go on: {one}"
    gc.collect()
    assert broken._cuda.held == 0 and fine._cuda.held == 0


@pytest.mark.parametrize(("code", "name"), [(2, "CUDA_ERROR_OUT_OF_MEMORY"), (4242, "error 4242")])
def test_errors_of_the_driver_have_their_names(code, name):
    with pytest.raises(MemoryRefused, match=f"cpu: cuMemCreate says {name}"):
        gpu(fails={"cuMemCreate": code}).make(SIZE)


def test_a_gpu_that_cannot_share_memory_so_is_refused_at_start():
    for able, what in (((103,), "manage memory"), ((102,), "export memory as a file")):
        with pytest.raises(MemoryRefused, match=f"cpu cannot {what}"):
            gpu(able=able)


def test_a_machine_without_nvidias_driver_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MemoryRefused, match=r"libcuda\.so\.1 cannot be loaded"):
        CudaDriver(torch.device("cuda", 0))


def test_memory_is_mapped_as_long_as_there_is_a_tensor_of_it(pair):
    drivers = gpu(), gpu()
    one, other = both(pair, *drivers)
    kept_B = one.theirs_B[4:12].view(torch.int32)
    del one
    gc.collect()
    assert len(drivers[0]._cuda.mapped) == 1
    kept_B[1] = 9
    assert other.mine_B[8:12].tolist() == [9, 0, 0, 0]
    del kept_B, other
    gc.collect()
    assert [driver._cuda.held for driver in drivers] == [0, 0]


def test_a_driver_makes_whole_steps():
    made = gpu().make(STEP + 1)
    os.close(made.file)
    assert made.whole == 2 * STEP and made.memory_B.shape == (STEP + 1,)


def test_a_tensor_over_an_address_says_the_device_that_it_is_for():
    base = torch.arange(16, dtype=torch.uint8)
    there = bytes_at(base.data_ptr(), 16, CPU, base)
    assert there.device == CPU and there.dtype is torch.uint8 and there.data_ptr() == base.data_ptr()
    there[3] = 200
    assert base[3] == 200
