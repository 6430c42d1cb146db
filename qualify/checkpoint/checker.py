"""Headers against declaration and inventory: is every tensor there, right in dtype and shape, and no other?

Three statements are compared: what the config promises (the inventory), how the declaration says each module
is stored (its scheme), and what the shard headers list.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from qualify.checkpoint import completeness, ignoring
from qualify.checkpoint.contents import (
    EXPERT,
    PLAIN,
    SCALE_LEAVES,
    ClassScope,
    Contents,
    is_quantised,
    stored_dtype,
)
from qualify.checkpoint.declared import Declared
from qualify.checkpoint.headers import Tensor
from qualify.checkpoint.matching import FUSED, Names
from qualify.checkpoint.problems import Findings, show
from qualify.checkpoint.schemes import NARROW, Scheme
from qualify.models.inventory import Inventory, Promised, layer_of, module_class

_BAD_ENTRY = ("tensor-entry", "tensor-dtype-unknown", "tensor-shape-absurd", "tensor-size")


class Checker:
    """One pass over all modules. Results: ``findings``, and scope, schemes and format in ``contents``."""

    def __init__(self, contents: Contents, declared: Declared, inventory: Inventory | None, findings: Findings):
        self.contents, self.declared, self.inventory, self.findings = contents, declared, inventory, findings
        self.excused = lambda name: False
        self.believe = True
        self._partial: list[str] = []
        self._bf16_scales: list[str] = []
        self._fused_scalars: list[str] = []
        self._missing: dict[str, list[str]] = {}
        self._plain_mtp: list[str] = []
        self._said: set[tuple[str, str]] = set()
        self._stored_quantised: set[str] = set()
        self._good: set[tuple[Any, ...]] = set()
        self._alike: Counter[tuple[str, str, tuple[int, ...], Scheme]] = Counter()
        self._drafts = range(0)
        self._complete = True

    def run(
        self,
        weight_map: dict[str, str] | None,
        unreadable: set[str],
        layers: int = 0,
        nextn: int = 0,
        experts: int = 0,
    ) -> None:
        """Check everything. ``unreadable`` shards excuse the tensors that the index puts there.

        Layers from number ``layers`` on, ``nextn`` of them, are draft (MTP) layers. ``experts`` is the config's
        number of routed experts, for models without an inventory.
        """
        self._drafts = range(layers, layers + nextn) if layers else range(0)
        self._complete = not unreadable
        # A tensor whose header entry is unusable has its own problem; it is not absent as well.
        reported = {problem.subject for problem in self.findings.problems if problem.code in _BAD_ENTRY}
        if weight_map is not None and "" not in unreadable:
            self.excused = lambda name: name in reported or weight_map.get(name) in unreadable
        elif unreadable:
            self.excused = lambda name: True
        else:
            self.excused = lambda name: name in reported
        stored = self.contents.modules
        promised = self.inventory.modules if self.inventory else {}
        names = Names(dict.fromkeys([*promised, *stored]))
        if self.declared.format == "fp8-block" and self.inventory is not None and self.inventory.experts:
            # Released dense models in this format store BF16 scales; MoVA's are F32, and a BF16 copy lost bits.
            self.declared.targets = [
                (target, replace(scheme, scale_dtypes=("F32",))) for target, scheme in self.declared.targets
            ]
        self.declared.bind(names, self.findings)
        ignoring.check(self.declared, names, stored, self.findings)
        self._whole()
        for name, entries in promised.items():
            self._promised(name, entries, stored.get(name))
        self._add_up()
        for name in stored:
            if name not in promised:
                self._unpromised(name, stored[name])
        self._report_missing(promised)
        if self.inventory is None and experts and self._complete:
            if layers:
                completeness.enumerate_layers(self.contents, layers, nextn, self.findings)
            completeness.enumerate_experts(self.contents, experts, self.findings)
        completeness.check_uniform(self.contents, self.findings)
        self._notes()

    def _whole(self) -> None:
        """Declared without quantised weights, or quantised weights undeclared: one problem for all."""
        declared, contents = self.declared, self.contents
        quantised = [name for name, leaves in contents.modules.items() if is_quantised(leaves)]
        self._stored_quantised = set(quantised)
        weights = [leaves["weight"] for leaves in contents.modules.values() if "weight" in leaves]
        declares = bool(declared.targets or declared.layer_map)
        contents.format = declared.format
        if declares and not quantised and weights and self._complete:
            contents.format = _plain_format(weights)
            self.believe = False
            self.findings.problem(
                "declared-not-stored",
                "quantization_config",
                f"{declared.origin} declares {declared.format}, and none of the {len(weights):,} weights is "
                f"stored quantised (they are {contents.format})",
            )
        elif not declares and quantised and declared.unserved is None:
            first = contents.modules[quantised[0]]
            if any(problem.code.startswith(("quantization-", "config-")) for problem in self.findings.problems):
                self.believe = False
                return
            kind = "fp8" if stored_dtype(first) in NARROW else "fp4" if stored_dtype(first) == "U8" else "integer"
            contents.format = f"{kind}-undeclared"
            self.believe = False
            self.findings.problem(
                "stored-not-declared",
                quantised[0],
                f"{len(quantised):,} weights are stored quantised (first {show(quantised[0])}, "
                f"{stored_dtype(first)}), and {declared.origin} declares nothing of the kind",
            )
        elif not declares and declared.unserved is not None:
            self.believe = False  # a format whose layout nobody here knows
        elif not declares and not quantised and weights and declared.unserved is None and declared.format == "bf16":
            contents.format = _plain_format(weights)

    def _scheme(self, name: str, promised: Promised) -> Scheme | None:
        if not self.believe:
            return None
        # compressed-tensors targets the class Linear; whether a router is one, nobody can tell from outside.
        linear = promised.linear and not (promised.klass == "router" and self.declared.rule != "fp8")
        return self.declared.scheme(name, linear)

    def _promised(self, name: str, entries: list[Promised], leaves: dict[str, Tensor] | None) -> None:
        if leaves is None:
            self._absent(name, entries)
            return
        consumed: set[str] = set()
        for promised in entries:
            scheme = self._scheme(name, promised)
            if scheme is not None and not promised.bias and self._as_before(promised, scheme, leaves):
                # Nearly every module of a large checkpoint: counted here, added up by _add_up.
                self._alike[promised.klass, name.rpartition(".")[2], promised.shape, scheme] += 1
                self.contents.schemes[name] = scheme
                return
            consumed |= self._module(name, promised, scheme, leaves)
        if not consumed >= leaves.keys():
            for leaf in sorted(leaves.keys() - consumed):
                self._extra(name, leaf, leaves[leaf])

    def _add_up(self) -> None:
        """Add the modules that looked like earlier ones to scope and signatures."""
        for (klass, last, shape, scheme), count in self._alike.items():
            scope = self.contents.scope.setdefault(klass, ClassScope())
            scope.dtypes[scheme.dtype] += count
            scope.quantised += count
            scope.schemes.add(scheme)
            self.contents.signatures[klass, last, shape[-2], shape[-1], scheme] += count

    def _absent(self, name: str, entries: list[Promised]) -> None:
        """Note every tensor of a module none of which is stored."""
        for promised in entries:
            scheme = self._scheme(name, promised)
            tensors = [promised.leaf if scheme is None else scheme.weight]
            if scheme is not None:
                tensors += [scheme.scale, *(leaf for leaf, needed in scheme.scalars if needed)]
            if promised.bias:
                tensors.append("bias")
            self._missing.setdefault(name, []).extend(tensors)

    def _extra(self, name: str, leaf: str, tensor: Tensor) -> None:
        plain = not is_quantised(self.contents.modules[name])
        if leaf in SCALE_LEAVES and plain:
            self.findings.problem(
                "scale-orphan",
                tensor.name,
                f"{show(tensor.name)} is a scale, and {show(name)} is not stored quantised",
            )
        elif leaf == "weight" and self.inventory is None:
            return
        else:
            self.findings.problem(
                "tensor-unexpected", tensor.name, f"{show(tensor.name)} is in no promise of config or format"
            )

    def _module(self, name: str, promised: Promised, scheme: Scheme | None, leaves: dict[str, Tensor]) -> set[str]:
        """Check one stored module; return the leaves that belong to it."""
        consumed: set[str] = set()
        klass = self.contents.scope.get(promised.klass)
        if klass is None:
            klass = self.contents.scope[promised.klass] = ClassScope()
        quantised = name in self._stored_quantised
        if promised.bias:
            bias = leaves.get("bias")
            consumed.add("bias")
            if bias is None:
                self._missing.setdefault(name, []).append("bias")
            elif bias.shape != promised.shape[:1]:
                self._shape(bias, promised.shape[:1])
            elif bias.dtype not in promised.dtypes:
                self._dtype_problem(bias, promised.dtypes)
        if scheme is None:
            consumed |= self._plain(name, promised, leaves, quantised)
        else:
            consumed |= self._quantised(name, promised, scheme, leaves, quantised)
        weight = leaves.get("weight_packed") or leaves.get(promised.leaf) or leaves.get("weight")
        if weight is not None:
            klass.dtypes[weight.dtype] += 1
            klass.quantised += quantised
            klass.unquantised += not quantised
            if quantised and scheme is not None:
                klass.schemes.add(scheme)
                self.contents.schemes[name] = scheme
            if promised.linear and len(promised.shape) >= 2:
                signature = (
                    promised.klass,
                    name.rpartition(".")[2],
                    promised.shape[-2],
                    promised.shape[-1],
                    scheme if quantised else None,
                )
                self.contents.signatures[signature] += 1
        return consumed

    def _as_before(self, promised: Promised, scheme: Scheme, leaves: dict[str, Tensor]) -> bool:
        """True when this weight and scale look like ones already found good: most experts do."""
        if len(leaves) != 2 or not scheme.block:
            return False
        weight, scale = leaves.get(scheme.weight), leaves.get(scheme.scale)
        if weight is None or scale is None:
            return False
        if scale.dtype == "BF16" and scheme.scale == "weight_scale_inv":
            return False  # noted one by one
        key = (
            scheme.name,
            promised.shape,
            scheme.block,
            scale.dtype,
            scale.shape,
            weight.dtype,
            weight.shape,
        )
        if key in self._good:
            return True
        if (
            weight.dtype == scheme.dtype
            and weight.shape == promised.shape
            and scale.dtype in scheme.scale_dtypes
            and scale.shape == _scale_shapes(scheme, promised.shape)[0]
            and not any(extent % block for extent, block in zip(promised.shape[-2:], scheme.block, strict=True))
        ):
            self._good.add(key)
        return key in self._good

    def _plain(self, name: str, promised: Promised, leaves: dict[str, Tensor], quantised: bool) -> set[str]:
        weight = leaves.get(promised.leaf)
        if quantised:
            if self.believe and name not in self.declared.ignored:
                scale = next((leaf for leaf in leaves if leaf in SCALE_LEAVES), None)
                self.findings.problem(
                    "head-quantised" if promised.klass == "lm_head" else "quantised-outside-scope",
                    name,
                    f"{show(name)} is stored {stored_dtype(leaves)} "
                    f"{f'with its {scale}' if scale else 'without a scale'}; "
                    f"{self.declared.format} does not declare it quantised",
                )
            return set(leaves)
        if weight is None:
            if promised.leaf == "weight" and "weight_packed" in leaves:
                return set(leaves)
            self._missing.setdefault(name, []).append(promised.leaf)
            return set()
        if weight.shape != promised.shape:
            self._shape(weight, promised.shape)
        if self.inventory is not None and weight.dtype not in promised.dtypes:
            self._dtype_problem(weight, promised.dtypes)
        return {promised.leaf}

    def _quantised(
        self, name: str, promised: Promised, scheme: Scheme, leaves: dict[str, Tensor], quantised: bool
    ) -> set[str]:
        """A module that is declared quantised: weight, scale and every other companion of its scheme."""
        findings = self.findings
        weight = leaves.get(scheme.weight)
        if weight is None and "weight" in leaves:
            weight = leaves["weight"]
        if weight is None:
            self._missing.setdefault(name, []).append(scheme.weight)
            return {scheme.weight, scheme.scale, *(leaf for leaf, _ in scheme.scalars)} | SCALE_LEAVES
        consumed = {weight.name.rpartition(".")[2], scheme.weight, "weight"}
        companions = [leaf for leaf in leaves if leaf in SCALE_LEAVES]
        if not quantised and not companions:
            if promised.klass == "mtp":
                self._plain_mtp.append(name)
            elif promised.klass != "vision" or self.declared.layer_map is not None:
                findings.problem(
                    "linear-not-ignored",
                    name,
                    f"{show(name)} is stored {weight.dtype}; {self.declared.format} declares it quantised and the "
                    "ignore list does not name it: engines would cast it, with a scale that was never loaded",
                )
            return consumed
        if weight.dtype != scheme.dtype:
            findings.problem(
                "weight-dtype",
                weight.name,
                f"{show(weight.name)} is stored {weight.dtype}"
                f"{' beside a scale' if not quantised else ''}; {scheme.name} stores {scheme.dtype}",
            )
        shape = promised.shape
        if len(shape) < 2:
            findings.problem(
                "tensor-shape",
                weight.name,
                f"{show(weight.name)} has shape {_shape(weight.shape)}; a quantised weight has rows and columns",
            )
            return set(leaves)
        stored = (*shape[:-1], -(-shape[-1] // 2)) if scheme.kind == "fp4" else shape
        if weight.shape != stored:
            self._shape(weight, stored)
        consumed |= self._scale(name, scheme, leaves, shape)
        for leaf, needed in scheme.scalars:
            consumed.add(leaf)
            tensor = leaves.get(leaf)
            if tensor is None:
                if needed:
                    self._missing.setdefault(name, []).append(leaf)
            else:
                self._scalar(tensor, name, shape)
        if scheme.kind == "fp8-tensor":
            consumed.add("input_scale")
        return consumed

    def _scale(self, name: str, scheme: Scheme, leaves: dict[str, Tensor], shape: tuple[int, ...]) -> set[str]:
        leaf = scheme.scale
        scale = leaves.get(leaf)
        if scale is None and scheme.scale_alias and scheme.scale_alias in leaves:
            leaf = scheme.scale_alias
            scale = leaves[leaf]
        if scale is None:
            other = next((x for x in ("weight_scale_inv", "weight_scale") if x in leaves and x != scheme.scale), None)
            if other is None:
                self._missing.setdefault(name, []).append(leaf)
                return {leaf}
            self.findings.problem(
                "scale-leaf",
                f"{name}.{other}",
                f"{show(name)} has {other}; {scheme.name} reads {scheme.scale}, and engines would leave that at its "
                "initialiser: relabelling the config does not convert a checkpoint",
            )
            scale, leaf = leaves[other], other
        elif scale.dtype not in scheme.scale_dtypes:
            self.findings.problem(
                "scale-dtype",
                scale.name,
                f"{show(scale.name)} is stored {scale.dtype}; {scheme.name} stores {' or '.join(scheme.scale_dtypes)}",
            )
        elif scale.dtype == "BF16" and scheme.scale == "weight_scale_inv":
            self._bf16_scales.append(scale.name)
        if scheme.kind == "fp8-tensor":
            self._scalar(scale, name, shape)
            if name.rpartition(".")[2] in FUSED:
                self._fused_scalars.append(name)
            return {leaf}
        wanted = _scale_shapes(scheme, shape)
        if scale.shape not in wanted:
            per = f"{scheme.block[0]}x{scheme.block[1]} blocks" if scheme.block else _per(scheme, scale, shape)
            self.findings.problem(
                "scale-shape",
                scale.name,
                f"{show(scale.name)} has shape {_shape(scale.shape)}; a weight of {_shape(shape)} in {per} needs "
                f"{' or '.join(_shape(item) for item in wanted)}",
            )
        elif scheme.block and (shape[-2] % scheme.block[0] or shape[-1] % scheme.block[1]):
            self._partial.append(name)
        return {leaf}

    def _scalar(self, tensor: Tensor, name: str, shape: tuple[int, ...]) -> None:
        count = math.prod(tensor.shape)
        # Stacked experts may carry one scalar each, and so may the parts of a projection fused on disk.
        parts = len(FUSED.get(name.rpartition(".")[2], ()))
        if count != 1 and not (len(shape) == 3 and count == shape[0]) and count != parts:
            self.findings.problem(
                "scale-shape",
                tensor.name,
                f"{show(tensor.name)} has shape {_shape(tensor.shape)}, not one value",
            )
        if tensor.dtype not in ("F32", "BF16"):
            self.findings.problem("scale-dtype", tensor.name, f"{show(tensor.name)} is stored {tensor.dtype}, not F32")

    def _shape(self, tensor: Tensor, wanted: tuple[int, ...]) -> None:
        self.findings.problem(
            "tensor-shape",
            tensor.name,
            f"{show(tensor.name)} has shape {_shape(tensor.shape)}; the config promises {_shape(wanted)}",
        )

    def _dtype_problem(self, tensor: Tensor, wanted: tuple[str, ...]) -> None:
        self.findings.problem(
            "tensor-dtype",
            tensor.name,
            f"{show(tensor.name)} is stored {tensor.dtype}; the checkpoint's is {' or '.join(wanted)}",
        )

    def _report_missing(self, promised: dict[str, list[Promised]]) -> None:
        missing = {}
        for name, leaves in self._missing.items():
            left = [leaf for leaf in leaves if not self.excused(f"{name}.{leaf}")]
            if left:
                missing[name] = left
        stacked = {subject for code, subject in self._said if code == "expert-layout"}
        completeness.report_missing(missing, self.contents, promised, stacked, self.declared.format, self.findings)

    def _unpromised(self, name: str, leaves: dict[str, Tensor]) -> None:
        klass = module_class(name)
        inventory = self.inventory
        layer = layer_of(name)
        drafts = inventory is None or "mtp" in inventory.skipped
        if layer is not None and klass not in ("mtp", "vision"):
            if drafts and layer in self._drafts:
                klass = "mtp"
            elif inventory is not None and layer >= inventory.layers:
                why = f"the config has {inventory.layers} layers"
                self._beyond("layer-beyond-config", f"layer {layer}", name, why)
                return
        if klass == "mtp" and drafts:
            mtp = self.contents.mtp or {"quantised": 0, "unquantised": 0}
            mtp["quantised" if is_quantised(leaves) else "unquantised"] += 1
            self.contents.mtp = mtp
        if inventory is None or klass in inventory.skipped:
            self._guess(name, klass, leaves)
            return
        if name == "lm_head":
            quantised = is_quantised(leaves)
            self.findings.problem(
                "head-quantised" if quantised else "head-tied-present",
                "lm_head.weight",
                "tie_word_embeddings is true, and lm_head.weight is stored"
                + (
                    f" {stored_dtype(leaves)}: nobody would read its scale"
                    if quantised
                    else "; engines drop one of the two"
                ),
            )
            return
        expert = EXPERT.match(f"{name}.")
        if klass == "routed_expert" and (expert is None or not expert[2].isdigit()):
            self._beyond(
                "expert-layout",
                name.partition(".experts")[0] + ".experts",
                name,
                "the config's layout is one gate_proj, up_proj and down_proj per expert",
            )
            return
        if klass == "routed_expert" and inventory.experts and int(expert[2][:9]) >= inventory.experts:
            self._beyond(
                "expert-beyond-config",
                f"{expert[1]}.{expert[2]}",
                name,
                f"the config has {inventory.experts} experts",
            )
            return
        for leaf in leaves:
            tensor = leaves[leaf]
            self.findings.problem(
                "tensor-unexpected",
                tensor.name,
                f"{show(tensor.name)} {tensor.dtype} is in no promise of the config",
            )

    def _beyond(self, code: str, subject: str, name: str, why: str) -> None:
        """One problem per subject, however many modules it has."""
        key = (code, subject)
        if key not in self._said:
            self._said.add(key)
            self.findings.problem(code, subject[:200], f"{show(name)} is stored ({show(subject)}); {why}")

    def _guess(self, name: str, klass: str, leaves: dict[str, Tensor]) -> None:
        """Without a promise the shape is read off the weight itself; companions must still fit it."""
        packed = leaves.get("weight_packed")
        weight = packed or leaves.get("weight")
        if weight is None:
            scope = self.contents.scope.setdefault("other" if klass == "dense_linear" else klass, ClassScope())
            for tensor in leaves.values():
                scope.dtypes[tensor.dtype] += 1
            scope.unquantised += 1
            orphan = next((leaf for leaf in leaves if leaf in SCALE_LEAVES), None)
            if orphan and not self.excused(f"{name}.weight"):
                self.findings.problem(
                    "scale-orphan", f"{name}.{orphan}", f"{show(name)}.{orphan} is stored without its weight"
                )
            return
        linear = len(weight.shape) >= 2 and klass not in ("embedding", "norm") and "conv" not in name
        if linear and klass in ("vision", "mtp") and self.inventory is not None and not is_quantised(leaves):
            linear = klass == "mtp" and self.declared.layer_map is None and self.declared.linear is not None
        if self.declared.rule == "fp8" and klass in ("lm_head", "router") and not is_quantised(leaves):
            linear = False  # engines never quantise these in this format, and released configs do not name them
        if not linear and klass == "dense_linear":
            klass = "other"
        promised = Promised(klass, linear, weight.shape, False)
        scheme = self._scheme(name, promised)
        if scheme is not None and scheme.kind == "fp4" and weight.dtype in ("U8", "I8") and weight.shape:
            promised = promised._replace(shape=(*weight.shape[:-1], weight.shape[-1] * 2))
        consumed = self._module(name, promised, scheme, leaves)
        bias = leaves.get("bias")
        if bias is not None and (
            bias.dtype in PLAIN and (scheme is None or bias.shape in (promised.shape[:1], promised.shape[:2]))
        ):
            consumed.add("bias")
        for leaf in sorted(set(leaves) - consumed):
            narrow = leaves[leaf].dtype in NARROW or leaves[leaf].dtype == "U8"
            if leaf in SCALE_LEAVES or scheme is not None or (narrow and self.believe):
                self._extra(name, leaf, leaves[leaf])

    def _notes(self) -> None:
        findings = self.findings
        if self._partial:
            findings.note(
                "partial-block",
                self._partial[0],
                f"{len(self._partial):,} weights end in a partial block (first {show(self._partial[0])}): "
                "legal in the file, and no tensor parallelism can split there",
            )
        if self._bf16_scales:
            findings.note(
                "scale-dtype",
                self._bf16_scales[0],
                f"{len(self._bf16_scales):,} scales are stored BF16 (first {show(self._bf16_scales[0])})",
            )
        if self._fused_scalars:
            findings.note(
                "fused-scalar",
                self._fused_scalars[0],
                f"{len(self._fused_scalars):,} fused projections carry one scalar scale (first "
                f"{show(self._fused_scalars[0])}): a loader must give it to every part",
            )
        if self._plain_mtp:
            findings.problem(
                "mtp-not-excluded",
                self._plain_mtp[0],
                f"the draft (MTP) layer holds {len(self._plain_mtp)} unquantised linears (first "
                f"{show(self._plain_mtp[0])}) that {self.declared.format} declares quantised",
            )
        vision = self.contents.scope.get("vision")
        if vision is not None:
            findings.note(
                "vision-skipped",
                "vision",
                f"{vision.quantised + vision.unquantised} vision modules are counted, not checked",
            )
        if self.contents.mtp:
            mtp = self.contents.mtp
            findings.note(
                "mtp",
                "mtp",
                f"draft (MTP) modules: {mtp['quantised']} quantised, {mtp['unquantised']} not",
            )
        if self.declared.rule == "compressed-tensors" and self.inventory is not None and self.declared.linear:
            routers = [
                name
                for name, entries in self.inventory.modules.items()
                if entries[0].klass == "router" and name not in self.declared.ignored
            ]
            if routers:
                findings.note(
                    "router-not-ignored",
                    routers[0],
                    f"{len(routers)} routers are not named in ignore (first {show(routers[0])}); stored unquantised",
                )


def _scale_shapes(scheme: Scheme, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that a scale of ``scheme`` may have for a weight of logical ``shape``."""
    *stack, rows, columns = shape
    if scheme.block:
        grid = (*stack, -(-rows // scheme.block[0]), -(-columns // scheme.block[1]))
        if scheme.scale_alias and not stack:
            # ModelOpt writes blocks as [rows, 1, columns, 1].
            return [grid, (grid[0], 1, grid[1], 1)]
        return [grid]
    if scheme.kind == "fp8-channel":
        return [(*stack, rows, 1), (*stack, rows)]
    return [(*stack, rows, -(-columns // scheme.group))]


def _per(scheme: Scheme, scale: Tensor, shape: tuple[int, ...]) -> str:
    if not scheme.group:
        return "channels"
    columns = scale.shape[-1] if scale.shape else 0
    stored = f" (stored: {shape[-1] // columns})" if columns and shape[-1] % columns == 0 else ""
    return f"groups of {scheme.group}{stored}"


def _plain_format(weights: list[Tensor]) -> str:
    most = Counter(tensor.dtype for tensor in weights).most_common(1)[0][0]
    return {"F16": "fp16", "F32": "fp32"}.get(most, "bf16")


def _shape(shape: tuple[int, ...]) -> str:
    return show(str(list(shape)))
