"""The kinds of devices that there are, by the words of `--device`, and why nodes do not compute on some. No torch."""

NOT_HERE = "nodes compute on CPUs and on NVIDIA's GPUs; use --device cpu on such a host"
AMD = "AMD: MI300's FP8 is e4m3fnuz, its wavefronts are 64 wide and its GPUs share memory by hipIpc"
_OTHERS = {
    "npu": "Ascend: PyTorch's streams, pinned memory and kernels there are torch-npu's and CANN's",
    "hip": AMD,
    "xpu": "Intel: its GPUs have no kernels here",
    "mps": "Apple: its GPUs have no kernels here",
}
_SAME = {"ascend": "npu", "rocm": "hip", "amd": "hip"}


def why_not(text: str) -> str:
    """Why nodes do not compute on this device of another maker; "" for NVIDIA's, a CPU and what is no kind."""
    kind = text.partition(":")[0]
    return _OTHERS.get(_SAME.get(kind, kind), "")
