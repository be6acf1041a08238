"""dualkv::unpack: copies forward, summed in a fixed order backward."""

import pytest
import torch

import dualkv_compile.unpack  # noqa: F401 (registers the operations)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def unpack(*args):
    return torch.ops.dualkv.unpack(*args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_zeros(dtype, device):
    packed = torch.tensor([[1, 2], [3, 4], [5, 6]], device=device).to(dtype)
    out = unpack(packed, torch.tensor([3, 0, 0, 2, 3], device=device))
    assert torch.equal(out, torch.tensor([[0, 0], [1, 2], [1, 2], [5, 6], [0, 0]], device=device).to(dtype))


def test_padding_reads_zero_whatever_is_packed():
    packed = torch.tensor([[1.0], [float("nan")]])
    assert unpack(packed, torch.tensor([0, 2])).tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradient_is_the_sum_over_copies(dtype, device):
    packed = torch.randn(3, 2, device=device).to(dtype).requires_grad_()
    index = torch.tensor([3, 0, 0, 2, 0], device=device)
    grad = torch.arange(10, device=device).view(5, 2).to(dtype)
    (got,) = torch.autograd.grad(unpack(packed, index), packed, grad)
    assert got.tolist() == [[14, 17], [0, 0], [6, 7]] and got.dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_is_summed_in_float32(device):
    # In bfloat16 1 is lost beside 256, and every further 1 with it.
    grad = torch.ones(257, 1, dtype=torch.bfloat16, device=device)
    grad[0] = 256
    out = torch.ops.dualkv.unpack_backward(grad, torch.zeros(257, dtype=torch.int64, device=device), 1)
    assert out.item() == 512


def test_half_precision_gradients_are_summed_in_pieces(monkeypatch):
    monkeypatch.setattr("dualkv_compile.unpack._CHUNK_ELEMENTS", 12)
    grad, index = torch.randn(5, 7).bfloat16(), torch.tensor([0, 1, 2, 0, 1])
    want = torch.zeros(3, 7).index_add_(0, index, grad.float())[:2].bfloat16()
    assert torch.equal(torch.ops.dualkv.unpack_backward(grad, index, 2), want)


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_is_the_same_every_time(device):
    torch.manual_seed(0)
    grad, index = torch.randn(4000, 33, device=device), torch.randint(0, 5, (4000,), device=device)
    runs = [torch.ops.dualkv.unpack_backward(grad, index, 5) for _ in range(4)]
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("num_tokens, index", [(0, []), (0, [0, 0]), (3, []), (3, [3, 3])])
def test_empty(num_tokens, index):
    packed = torch.ones(num_tokens, 2, requires_grad=True)
    out = unpack(packed, torch.tensor(index, dtype=torch.int64))
    assert out.tolist() == [[0, 0]] * len(index)
    (grad,) = torch.autograd.grad(out.sum(), packed)
    assert torch.equal(grad, torch.zeros(num_tokens, 2))


def test_never_returns_its_input():
    packed, index = torch.randn(4, 2), torch.arange(4)
    assert unpack(packed, index).data_ptr() != packed.data_ptr()
    assert torch.ops.dualkv.unpack_backward(packed, index, 4).data_ptr() != packed.data_ptr()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    index = torch.tensor([0, 3, 1, 0])
    packed = torch.randn(3, 2, requires_grad=requires_grad)
    torch.library.opcheck(torch.ops.dualkv.unpack, (packed, index))
    torch.library.opcheck(torch.ops.dualkv.unpack_backward, (torch.randn(4, 2), index, 3))


def test_gradcheck_and_strided_gradients():
    index = torch.tensor([0, 3, 1, 0])
    packed = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpack(x, index).t() * 2, packed)
