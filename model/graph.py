"""Decoding without the host's share: a step of one token is captured once, and replayed.

On CUDA by a CUDA graph. On a CPU, where Python and torch's own bookkeeping take half of a small model's step, by a list
of its operations, each of which writes again where it wrote first.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.cache import Cache, KVCache

# On a CPU a captured step has a fixed number of keys, the room: at least this many, and twice as many when it is full.
ROOM = 256
WORTH = 32  # steps that pay for a capture

aten = torch.ops.aten
# Refused though no tag says so: resolve_neg is what .tolist() and .numpy() call; the others are sized by numbers.
REFUSED = {
    aten.resolve_neg.default,
    aten.where.default,
    aten.nonzero_numpy.default,
    aten.repeat_interleave.self_Tensor,
    aten.tensor_split.tensor_indices_or_sections,
}


class CannotCaptureError(Exception):
    """An operation of the step cannot be repeated without Python."""


class Tape(TorchDispatchMode):
    """Records the operations inside the `with`, and at its end runs them again, on the same memory, as replays do.

    varies: tensors whose numbers may be others at the next replay. What is computed from others alone, and written by
    nothing else, is computed once. Whatever was read or made is kept, so that every view of it remains valid. Raises
    CannotCaptureError for what hands numbers to Python (.item()) or has as many results as the numbers say.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would load the compiler, most of a second

    def __init__(self, *varies: Tensor):
        super().__init__()
        self.varying = set(map(_memory, varies))
        self.seen: list[tuple] = []
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        read, made = list(_tensors((*args, *kwargs.values()))), list(_tensors((result,)))
        _, _, refused = _about(op)
        if op is aten.index.Tensor:
            refused = any(x.dtype in (torch.bool, torch.uint8) for x in read[1:])
        if refused or (read and not made):
            raise CannotCaptureError(str(op))
        self.seen.append((op, args, kwargs, result, read, made))
        return result

    def __exit__(self, kind, *error) -> None:
        super().__exit__(kind, *error)
        if kind is not None:
            return
        for op, _, _, _, read, _ in self.seen:
            if _about(op)[0]:  # what is written in place has to be made anew each time, too
                self.varying |= set(map(_memory, read))
        for op, args, kwargs, result, read, made in self.seen:
            memory, new = set(map(_memory, read)), set(map(_memory, made))
            in_place, random, _ = _about(op)
            if in_place:
                self.calls.append(_called(op, args, kwargs))
            elif not new <= memory and (random or not self.varying.isdisjoint(memory | new)):  # <=: a view
                self.varying |= new
                form = _out_form(op)
                if form is None:
                    self.calls.append(_called(op, args, kwargs, result))
                else:
                    self.calls.append(_called(form, args, {**kwargs, "out": result}))

    def replay(self) -> None:
        for call in self.calls:
            call()


@cache
def _about(op) -> tuple[bool, bool, bool]:
    """Whether an operation writes to its arguments, draws random numbers, and cannot be repeated."""
    refused = torch.Tag.dynamic_output_shape in op.tags or op in REFUSED
    return op._schema.is_mutable, torch.Tag.nondeterministic_seeded in op.tags, refused


def _memory(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except RuntimeError as error:  # sparse, or another library's
        raise CannotCaptureError(str(error)) from error


def _tensors(values: tuple) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _called(op, args: tuple, kwargs: dict, into: Tensor | tuple | None = None) -> Callable[[], object]:
    """The operation with its arguments, its results copied to `into`; it is called once."""
    # torch's function of that name parses arguments in half the time, but a few take others than the operation.
    name = op._schema.name.removeprefix("aten::")
    spaces = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
    for function in (*(getattr(space, name) for space in spaces if hasattr(space, name)), op):
        call = partial(function, *args, **kwargs)
        if into is not None:
            call = partial(_copied if isinstance(into, Tensor) else _all_copied, into, call)
        try:
            call()
        except TypeError:
            if function is op:
                raise
        else:
            return call


def _copied(into: Tensor, call: Callable[[], Tensor]) -> None:
    into.copy_(call())


def _all_copied(into: tuple, call: Callable[[], tuple]) -> None:
    for x, new in zip(_tensors(into), _tensors(call()), strict=True):
        x.copy_(new)


@cache
def _out_form(op):
    """The form of an operation that writes its one result into a tensor given as `out`; None where it has none."""
    arguments = [(about.name, str(about.type)) for about in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        form = getattr(op.overloadpacket, name)
        out = [about.name for about in form._schema.arguments if about.is_out]
        others = [(about.name, str(about.type)) for about in form._schema.arguments if not about.is_out]
        generated = torch.Tag.generated in form.tags  # allocates and copies, too
        if out == ["out"] and others == arguments and not generated:
            return form
    return None


def one_token_steps(model, held: Cache) -> Callable[[Tensor], Tensor]:
    """A function for the cache's remaining room: token int64 (B, 1) -> logits (B, V) of the next one.

    held: a cache with at least one token, for nothing else from then on; the model's weights stay what they are. The
    logits may be overwritten by the next call. They are those of the model's passes of one token.
    """
    if can_graph(model, held) and (held.max_length - held.length >= WORTH or held.keys.is_cuda):
        return GraphedStep(model, held)
    return lambda token: model(token, cache=held)[:, -1]


def can_graph(model, held: Cache) -> bool:
    """Whether every step is the same kernels on the same tables.

    Not for linear attention, whose state is a new tensor each step, nor where the frequencies change on the way, nor
    with hooks on modules, which a replay would not call. On CUDA also not under autocast, which keeps casts of the
    weights between steps, nor under any scaling, which was not tried there.
    """
    device = held.tokens.device.type
    if device not in ("cpu", "cuda") or not isinstance(held, KVCache):
        return False
    if device == "cuda" and (model.config.scaling is not None or torch.is_autocast_enabled(device)):
        return False
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    first, last = (held.scaling_length or length for length in (held.length, held.max_length))
    return not hooked and model.pos.regime(first) == model.pos.regime(last)


class GraphedStep:
    """The model's step for a cache that holds at least one token: token int64 (B, 1) -> logits (B, V) of the next.

    The logits are overwritten by the next step. While steps are replayed, the cache's own length stands still. A CPU's
    that cannot be captured are passes as any other: `replay` is None then.
    """

    def __init__(self, model, held: KVCache):
        self.model, self.held, self.length, device = model, held, held.length, held.keys.device
        self.token = torch.zeros((held.batch_size, 1), dtype=torch.int64, device=device)
        held.newest, held.room = torch.tensor([held.length], device=device), held.length
        self._capture()

    def __call__(self, token: Tensor) -> Tensor:
        if self.replay is not None and self.length == self.held.room:
            self._capture()
        if self.replay is None:
            return self.model(token, cache=self.held)[:, -1]
        self.token.copy_(token)
        self.held.newest.fill_(self.length)
        self.replay()
        self.length += 1
        return self.logits

    def _capture(self) -> None:
        if self.held.keys.is_cuda:
            return self._capture_cuda()
        held = self.held
        held.room = min(held.max_length, max(ROOM, 2 * held.room))
        held.newest.fill_(self.length)
        try:
            with Tape(self.token, held.newest, held.keys, held.values) as tape:
                self.logits = self.model.fixed_step(self.token, held)
            self.replay = tape.replay
        except CannotCaptureError:
            held.newest, held.length, self.replay = None, self.length, None

    def _capture_cuda(self) -> None:
        self.held.room = self.held.max_length
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up, which must not be captured
            for _ in range(2):
                self.model.fixed_step(self.token, self.held)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self.model.fixed_step(self.token, self.held)
        self.replay = graph.replay
