"""The operator without a GPU: what it passes to the launcher, its fake implementation, graphs that hold it."""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses import FakeTensorMode

from buddyring.placement import Placement
from megaring.backends import fused
from megaring.device_shards import to_device as shards_to_device
from megaring.errors import UserError
from megaring.kernels import ops
from megaring.kernels.backward_plan import plan_backward
from megaring.kernels.forward_plan import plan_forward
from megaring.kernels.megaring_backward import backward_to_device
from megaring.kernels.megaring_forward import to_device
from megaring.kernels.ops import Launch, Site

CPU = torch.device("cpu")
ROWS = 48
forward = torch.ops.megaring.forward


@pytest.fixture
def site():
    plan = plan_forward(Placement.from_groups([30, 15], 1, [(0, 1), (0, 1)], rank_multiple=16).shards(0))
    assert plan.rows == ROWS
    return Site(to_device(plan, CPU), domain="domain")


@pytest.fixture
def options():
    """How the last call was launched."""
    return {}


@pytest.fixture
def launches(monkeypatch, options):
    """Runs the operator on CPU tensors, with a launcher that notes what it gets and writes known values."""
    seen = []

    def launch(domain, calls, *, softmax_scale, timeout_s, reserved_sms):
        (call,) = calls
        seen.append((domain, call, softmax_scale))
        options.update(timeout_s=timeout_s, reserved_sms=reserved_sms)
        call.out.copy_(call.q * softmax_scale)
        call.lse.copy_(call.q[:, :, 0])

    monkeypatch.setattr(ops, "megaring_forward", launch)
    with torch.library._scoped_library("megaring", "IMPL") as library:
        library.impl("forward", ops.attend, "CPU")
        yield seen


def tensors(device="cpu", dtype=torch.bfloat16):
    return [torch.randn(ROWS, heads, 64, device=device).to(dtype) for heads in (4, 2, 2)]


def test_a_call_reaches_the_launcher(site, launches):
    q, k, v = tensors()
    out, lse = forward(q, k, v, site.number, 0.5)
    ((domain, call, scale),) = launches
    assert (domain, call.plan, scale) == ("domain", site.plan, 0.5)
    assert [x.data_ptr() for x in (call.q, call.k, call.v)] == [x.data_ptr() for x in (q, k, v)]
    assert torch.equal(out, q * 0.5) and torch.equal(lse, q[:, :, 0].float())


@pytest.mark.parametrize("what", ["columns", "start", "stride"])
def test_inputs_that_the_copy_engine_cannot_address_are_copied(site, launches, what):
    _, k, v = tensors()
    q = {
        "columns": torch.randn(ROWS, 64, 4).bfloat16().transpose(1, 2),
        "start": torch.randn(ROWS * 4 * 64 + 1).bfloat16()[1:].view(ROWS, 4, 64),
        "stride": torch.randn(ROWS, 4, 65).bfloat16()[:, :, :64],
    }[what]
    out, _ = forward(q, k, v, site.number, 0.5)
    passed = launches[0][1].q
    assert passed.is_contiguous() and passed.data_ptr() % 16 == 0 and torch.equal(passed, q)
    assert out.is_contiguous() and torch.equal(out, q * 0.5)


def test_a_call_is_launched_as_its_site_says(site, launches, options):
    forward(*tensors(), site.number, 0.5)
    assert options == {"timeout_s": 60.0, "reserved_sms": 0}
    hurried = Site(site.plan, "domain", Launch(timeout_s=2.0, reserved_sms=8))
    forward(*tensors(), hurried.number, 0.5)
    assert options == {"timeout_s": 2.0, "reserved_sms": 8}


@pytest.fixture
def shared_site():
    """A site of rank 1 of 2, which holds nothing."""
    plan = plan_forward(Placement.from_groups([64], 2, [(0, 1)]).shards(1))
    return Site(to_device(plan, CPU), domain="shared")


def test_a_rank_without_rows_launches_if_others_wait_for_it(shared_site, launches):
    out, lse = forward(*(x[:0] for x in tensors()), shared_site.number, 0.5)
    assert [domain for domain, _, _ in launches] == ["shared"]
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))


@pytest.mark.parametrize("kind", ["gaps", "heads first", "same tensor"])
def test_keys_that_cannot_be_sent_as_they_are_are_copied(shared_site, launches, kind):
    q, k, v = tensors()
    if kind == "gaps":
        k = torch.randn(ROWS, 4, 64).bfloat16()[:, ::2]
    elif kind == "heads first":
        k = torch.randn(2, ROWS, 64).bfloat16().transpose(0, 1)
    else:
        q = k = v = torch.randn(ROWS, 4, 64).bfloat16()[:, ::2]
    forward(q, k, v, shared_site.number, 0.5)
    call = launches[0][1]
    assert call.k.is_contiguous() and torch.equal(call.k, k)
    assert call.q.data_ptr() == q.data_ptr(), "queries are not sent"


def test_a_rank_without_rows_launches_nothing(site, launches):
    empty = [x[:0] for x in tensors()]
    out, lse = forward(*empty, site.number, 0.5)
    assert (out.shape, lse.shape, launches) == ((0, 4, 64), (0, 4), [])


def test_a_site_that_is_gone_is_named(launches):
    plan = plan_forward(Placement.from_groups([48], 1, [(0, 1)]).shards(0))
    number = Site(to_device(plan, CPU), domain=None).number
    gc.collect()
    with pytest.raises(UserError, match=f"attention site {number} is gone; keep its shards"):
        forward(*tensors(), number, 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fake_has_the_shapes_of_the_real_one(site, dtype):
    with FakeTensorMode():
        q, k, v = tensors("cuda", dtype)
        out, lse = forward(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, site.number, 0.5)
    assert (out.shape, out.dtype, out.device.type, out.is_contiguous()) == ((ROWS, 4, 64), dtype, "cuda", True)
    assert (lse.shape, lse.dtype, lse.device.type) == ((ROWS, 4), torch.float32, "cuda")


def test_the_registration_is_consistent(site, launches):
    results = torch.library.opcheck(
        forward.default, (*tensors(), site.number, 0.5), test_utils=("test_schema", "test_faketensor")
    )
    assert set(results.values()) == {"SUCCESS"}


def test_a_graph_holds_the_call_whole(site, launches):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def layer(q, k, v):
        out, lse = forward(q * 2, k, v, site.number, 0.5)
        return out + 1, lse

    q, k, v = tensors()
    compiled = torch.compile(layer, backend=keep, fullgraph=True)
    out, _ = compiled(q, k, v)
    assert torch.equal(out, q + 1)
    (graph,) = graphs
    assert [node.target for node in graph.graph.nodes if node.target == forward] == [forward]
    assert len(launches) == 1, "compiling launched something"


def test_new_steps_do_not_recompile_forever(site, launches):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, k, v, number: forward(q, k, v, number, 0.5)[0], backend=keep, fullgraph=True)
    sites = [site, *(Site(site.plan, f"domain {step}") for step in range(3))]
    for each in sites:
        compiled(*tensors(), each.number)
    assert len(graphs) == 2, "the second step makes the number a variable, the others use that graph"
    assert [domain for domain, _, _ in launches] == ["domain", "domain 0", "domain 1", "domain 2"]


def test_a_graph_survives_functionalisation(site, launches):
    def layer(q, k, v):
        return forward(q * 2, k, v, site.number, 0.5)[0] + 1

    q, k, v = tensors()
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v), q + 1)


@pytest.fixture
def trained_site():
    """A site whose calls may be differentiated, and its notes of backward launches."""
    placement = Placement.from_groups([30, 15], 1, [(0, 1), (0, 1)], rank_multiple=16)
    plan = backward_to_device(plan_backward(placement.shards(0)), None, CPU)
    domain = SimpleNamespace(workspace=lambda *shape: shape)
    return Site(plan.forward, domain, Launch(timeout_s=3.0, reserved_sms=4), plan, heads_per_task=2)


@pytest.fixture
def backward_launches(monkeypatch, launches):
    """Runs both operators on CPU tensors; the backward's launcher notes what it gets and writes known values."""
    seen = []

    def launch(domain, calls, **options):
        (call,) = calls
        seen.append((domain, call, options))
        call.dq.copy_(call.output_gradient * 2)
        call.dk.copy_(call.forward.k * 3)
        call.dv.copy_(call.forward.v * 4)

    monkeypatch.setattr(ops, "megaring_backward", launch)
    with torch.library._scoped_library("megaring", "IMPL") as library:
        library.impl("backward", ops.differentiate, "CPU")
        yield seen


def test_a_gradient_reaches_the_launcher_and_comes_back(trained_site, backward_launches):
    q, k, v = (x.requires_grad_() for x in tensors())
    out, lse = forward(q, k, v, trained_site.number, 0.5)
    assert out.requires_grad and not lse.requires_grad
    gradient = torch.randn(ROWS, 64, 4).bfloat16().transpose(1, 2)  # columns that the copy engine cannot address
    out.backward(gradient)
    ((domain, call, options),) = backward_launches
    assert domain is trained_site.domain and call.plan is trained_site.gradients
    assert options == {"softmax_scale": 0.5, "heads_per_task": 2, "timeout_s": 3.0, "reserved_sms": 4}
    assert call.workspace == (2, 4, 64), "query tiles, query heads, head dimension"
    assert torch.equal(call.forward.out, out) and torch.equal(call.forward.lse, lse)
    assert call.output_gradient.is_contiguous() and torch.equal(call.output_gradient, gradient)
    assert torch.equal(q.grad, gradient * 2) and torch.equal(k.grad, k * 3) and torch.equal(v.grad, v * 4)


def test_an_eager_call_gives_what_the_operator_gives_without_the_dispatcher(trained_site, backward_launches):
    q, k, v = (x.requires_grad_() for x in tensors())
    out, lse = ops.call(q, k, v, trained_site.number, 0.5)
    assert out.requires_grad and not lse.requires_grad and "_Attention" in type(out.grad_fn).__name__
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), gradient)
    wanted = torch.autograd.grad(forward(q, k, v, trained_site.number, 0.5)[0], (q, k, v), gradient)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    with torch.no_grad():
        assert not ops.call(q, k, v, trained_site.number, 0.5)[0].requires_grad


def test_a_second_derivative_is_an_error(trained_site, backward_launches):
    q, k, v = (x.requires_grad_() for x in tensors())
    out, _ = ops.call(q, k, v, trained_site.number, 0.5)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        first.sum().backward()


def test_calls_of_two_steps_are_differentiated_in_reverse_order(trained_site, backward_launches):
    other = Site(trained_site.plan, trained_site.domain, gradients=trained_site.gradients)
    q, k, v = (x.requires_grad_() for x in tensors())
    out, _ = forward(q, k, v, trained_site.number, 0.5)
    out, _ = forward(out, k, v, other.number, 0.25)
    out.sum().backward()
    assert [options["softmax_scale"] for _, _, options in backward_launches] == [0.25, 0.5]


def test_recompute_differentiates_the_second_call(trained_site, launches, backward_launches):
    q, k, v = (x.requires_grad_() for x in tensors())
    layer = lambda *x: forward(*x, trained_site.number, 0.5)[0]  # noqa: E731
    out = torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False)
    out.sum().backward()
    assert len(launches) == 2 and len(backward_launches) == 1


def test_a_site_without_gradients_is_named_when_one_is_asked_of_it(site, backward_launches):
    q, k, v = tensors()
    out, _ = forward(q.requires_grad_(), k, v, site.number, 0.5)
    with pytest.raises(UserError, match=f"attention site {site.number} was made for calls without gradients"):
        out.sum().backward()


def test_the_fake_gradients_have_the_shapes_of_the_real_ones(trained_site):
    with FakeTensorMode():
        q, k, v = tensors("cuda")
        out, lse = forward(q, k, v, trained_site.number, 0.5)
        found = torch.ops.megaring.backward(out, q, k, v, out, lse, trained_site.number, 0.5)
    assert [(x.shape, x.dtype, x.device.type) for x in found] == [(x.shape, x.dtype, "cuda") for x in (q, k, v)]


def test_a_compiled_layer_is_differentiated(trained_site, backward_launches):
    q, k, v = (x.requires_grad_() for x in tensors())
    layer = torch.compile(lambda *x: forward(*x, trained_site.number, 0.5)[0] * 2, backend="aot_eager", fullgraph=True)
    layer(q, k, v).sum().backward()
    assert len(backward_launches) == 1 and torch.equal(q.grad, torch.full_like(q, 4))


def test_the_backend_keeps_one_site_for_all_layers(launches, monkeypatch):
    class Stream:
        cuda_stream = 7

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fused._domains, "local", lambda device, stream: (device, stream))
    placement = Placement.from_groups([30, 15], 2, [(1, 1), (1, 1)], rank_multiple=16)
    shards = shards_to_device(placement.shards(1), CPU)
    q, k, v = tensors()
    request = fused.Request(q, k, v, shards, None, 0.25, True, False)
    out, lse = fused.attend(request)
    fused.attend(request)
    (domain, first, scale), (_, second, _) = launches
    assert (domain, scale, first.plan) == ((CPU, 7), 0.25, second.plan)
    assert (first.plan.plan.rank, first.plan.plan.ranks, first.plan.plan.tokens) == (0, 1, 45)
    assert torch.equal(out, q * 0.25) and lse.shape == (ROWS, 4)
