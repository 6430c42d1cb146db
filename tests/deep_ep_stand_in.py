"""A stand-in for the ``deep_ep`` package: the calls that the engine's dispatcher makes, without its kernels.

Only the transport is replaced: what a rank sends and receives follows DeepEP's documented contract (legacy ``Buffer``),
carried by ``all_gather_object`` of the process group, or by nothing when the group has one rank. The engine's own
dispatcher, permutation and runner stand on top of it unchanged. ``install`` must run before ``sglang`` is imported.
"""

from __future__ import annotations

import sys
import types

import torch
import torch.distributed as dist

FP8_MAX = 448.0


class Config:
    """The tuning of the real kernels; there is none here."""


class Event:
    """Everything here is in order already."""

    def current_stream_wait(self) -> None:
        pass


class Buffer:
    """The communication buffer of one rank of ``group``; ``None`` is a group of one rank: a loopback."""

    num_sms = 20
    low_latency_mode = True

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.group_size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()

    @staticmethod
    def capture() -> Event:
        return Event()

    def clean_low_latency_buffer(self, *args) -> None:
        pass

    def get_dispatch_layout(self, topk_idx, num_experts, **_):
        """Tokens for each rank and for each expert, and which token goes to which rank; -1 is no expert."""
        assert topk_idx.dtype == torch.int64
        local = num_experts // self.group_size
        ranks = torch.where(topk_idx < 0, -1, topk_idx // local)
        in_rank = torch.stack([(ranks == rank).any(1) for rank in range(self.group_size)], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, Event()

    def dispatch(self, x, *, topk_idx, topk_weights, num_tokens_per_expert, expert_alignment, **_):
        """Normal mode: a token comes once to every rank that has any of its experts.

        ``x`` is (codes (tokens, hidden) E4M3, scales (tokens, hidden / 128) FP32). Returns what came, experts counted
        from this rank's first one (-1 elsewhere, weight 0), tokens of each expert rounded up to ``expert_alignment``.
        """
        local = len(num_tokens_per_expert) // self.group_size
        # As bytes: FP8 is neither pickled nor indexed by every build of torch.
        sent = self._everyone((x[0].view(torch.uint8), x[1], topk_idx, topk_weights))
        codes, scales, ids, weights, rows = [], [], [], [], []
        for from_codes, from_scales, from_ids, from_weights in sent:
            ours = (from_ids >= self.rank * local) & (from_ids < (self.rank + 1) * local)
            row = ours.any(1).nonzero().flatten()
            rows.append(row)
            codes.append(from_codes[row])
            scales.append(from_scales[row])
            ids.append(torch.where(ours, from_ids - self.rank * local, -1)[row])
            weights.append(torch.where(ours, from_weights, 0)[row])
        ids = torch.cat(ids)
        counts = torch.bincount(ids[ids >= 0], minlength=local).tolist()
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts]
        received = torch.cat(codes).view(torch.float8_e4m3fn), torch.cat(scales)
        return received, ids, torch.cat(weights), aligned, (rows, len(topk_idx)), Event()

    def combine(self, x, handle, **_):
        """Add up what all ranks made of this rank's tokens; BF16 (tokens, hidden)."""
        rows, tokens = handle
        out = torch.zeros(tokens, x.shape[1], dtype=torch.float32, device=x.device)
        parts = x.split([len(row) for row in rows])
        for theirs, from_rows in self._everyone((parts, rows)):
            out.index_add_(0, from_rows[self.rank], theirs[self.rank].float())
        return out.to(x.dtype), None, Event()

    def low_latency_dispatch(self, x, topk_idx, num_max, num_experts, use_fp8, **_):
        """Low latency: one row of room for every (rank, token) in each expert, the first ``count`` of them filled.

        ``x`` is BF16 (tokens, hidden). Returns (codes (local experts, ranks * num_max, hidden), scales of the same
        with hidden / 128 columns, columns first in memory) and the counts, INT32.
        """
        assert use_fp8 and len(x) <= num_max and topk_idx.dtype == torch.int64
        local, room = num_experts // self.group_size, self.group_size * num_max
        codes, scales = quantise(x)
        sent = self._everyone((codes.view(torch.uint8), scales, topk_idx))
        codes, scales, ids = (torch.cat(parts) for parts in zip(*sent, strict=True))
        token, slot = ((ids >= 0) & (ids // local == self.rank)).nonzero().unbind(1)
        expert = ids[token, slot] - self.rank * local
        mine = torch.nn.functional.one_hot(expert, local)
        place = (mine.cumsum(0) - 1).gather(1, expert[:, None]).flatten()
        packed = torch.full((local, room, x.shape[1]), 0x7F, dtype=torch.uint8, device=x.device)  # NaN where none is
        packed_scales = torch.full((local, scales.shape[1], room), float("nan"), device=x.device).transpose(1, 2)
        packed[expert, place], packed_scales[expert, place] = codes[token], scales[token]
        ends = torch.tensor([len(i) for _, _, i in sent]).cumsum(0).to(x.device)
        senders = torch.bincount(torch.bucketize(token, ends, right=True), minlength=self.group_size).tolist()
        handle = (expert, place, senders)
        return (packed.view(torch.float8_e4m3fn), packed_scales), mine.sum(0).int(), handle, Event(), lambda: None

    def low_latency_combine(self, *, x, topk_idx, topk_weights, handle, **_):
        """Weigh and add up, in FP32, the rows that all ranks made of this rank's tokens; BF16 (tokens, hidden)."""
        expert, place, senders = handle
        local = x.shape[0]
        out = torch.zeros(len(topk_idx), x.shape[2], dtype=torch.float32, device=x.device)
        for rank, theirs in enumerate(self._everyone(x[expert, place].split(senders))):
            token, slot = ((topk_idx >= 0) & (topk_idx // local == rank)).nonzero().unbind(1)
            out.index_add_(0, token, topk_weights[token, slot, None] * theirs[self.rank].float())
        return out.to(x.dtype), Event(), lambda: None

    def _everyone(self, mine) -> list:
        """What every rank of the group gives here, in the order of ranks."""
        if self.group_size == 1:
            return [mine]
        found = [None] * self.group_size
        dist.all_gather_object(found, mine, group=self.group)
        return found


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and FP32 scales of the last dimension of ``x`` in groups of 128, the largest value becoming 448."""
    groups = x.float().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1).clamp(min=1e-10) / FP8_MAX
    codes = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scales


def install() -> None:
    """Make ``import deep_ep`` give this module's classes. Raises ``RuntimeError`` when the engine looked already."""
    if "sglang.srt.layers.moe.token_dispatcher.deepep" in sys.modules:
        raise RuntimeError("the engine's DeepEP dispatcher is imported already: install the stand-in first")
    package = types.ModuleType("deep_ep")
    package.Buffer, package.Config = Buffer, Config
    sys.modules["deep_ep"] = package


def connect(group: dist.ProcessGroup | None = None) -> None:
    """Give the engine's dispatchers of this process the buffer that they would otherwise make on a GPU."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPBuffer, DeepEPConfig

    DeepEPBuffer._state().buffer = Buffer(group)
    DeepEPConfig._instance = types.SimpleNamespace(normal_dispatch_config=None, normal_combine_config=None)
