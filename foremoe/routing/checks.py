"""Strict checks of a routing trace."""

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array, as_array, frozen_array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.fields import shown
from foremoe.machine.model import Model

# Letters: T tokens, L MoE layers, K top-k, Q sequences, E experts.

MAX_EXPERTS = int(np.iinfo(np.int16).max)


def known_model(model: str | Model | None) -> Model | None:
    """Returns `model` itself, or the preset with that name or hub name. Returns None for other names, which are only labels."""
    if not isinstance(model, str | Model | None):
        raise InputError(f"model must be a Model or the name of one; got {type(model).__name__}.")
    if isinstance(model, str):
        found = Model.preset_of(model)
        return None if found is None else Model.preset(found)
    return model


def preset_layers(model: str | Model | None, num_layers: int, num_experts: int, num_topk: int) -> Array:
    """Returns the layer numbers of `model` as int32 [L] if it has L layers, else 0 to L-1. Its experts and top-k must match."""
    preset = known_model(model)
    if preset is None:
        return np.arange(num_layers, dtype=np.int32)
    if (preset.num_experts, preset.num_topk) != (num_experts, num_topk):
        sizes = f"top-{preset.num_topk} of {preset.num_experts} experts but the data is top-{num_topk} of {num_experts}"
        raise InputError(f"model {preset.name!r} routes {sizes}; name the model that was recorded.")
    return preset.moe_layer_L if preset.num_layers == num_layers else np.arange(num_layers, dtype=np.int32)


def layer_numbers(value: npt.ArrayLike, num_layers: int) -> Array:
    """Returns layer numbers as int32 [L]. Raises InputError unless they are distinct and >= 0."""
    moe_layer_L = frozen_array(value, np.int32, "moe_layer_L", (num_layers,))
    if moe_layer_L.min() < 0 or len(np.unique(moe_layer_L)) != num_layers:
        raise InputError(f"moe_layer_L must hold {num_layers} distinct layer numbers from 0; got {moe_layer_L.tolist()}.")
    return moe_layer_L


def layer_positions(indices: npt.ArrayLike, num_layers: int) -> Array:
    """Returns positions of layers as int64. Raises InputError if there is none, or if one is repeated or out of range."""
    index = as_array(indices, "layers")
    fits = index.ndim == 1 and index.size and index.dtype.kind in "iu" and index.min() >= 0 and index.max() < num_layers
    if not fits or len(np.unique(index)) != index.size:
        raise InputError(f"layers must be distinct indices (positions from 0 to {num_layers - 1}); got {shown(indices)}.")
    return index.astype(np.int64)


def checked_known(value: Array | None, num_tokens: int) -> Array | None:
    """Returns a mask of the tokens whose routing is known, bool [T], or None if the routing of every token is known."""
    if value is None:
        return None
    known_T = as_array(value, "known_T")
    if known_T.dtype != bool:
        raise InputError(f"known_T must be bool, True where a token's routing is known; got {known_T.dtype}.")
    known_T = frozen_array(known_T, np.bool_, "known_T", (num_tokens,))
    return None if known_T.all() else known_T


def checked_lengths(value: npt.ArrayLike, num_tokens: int) -> Array:
    """Returns sequence lengths as int64 [Q]. Raises InputError unless each is at least 1 and they sum to the number of tokens."""
    seq_len_Q = frozen_array(value, np.int64, "seq_len_Q", (None,))
    if not seq_len_Q.size or seq_len_Q.min() < 1:
        q = int(np.argmax(seq_len_Q < 1)) if seq_len_Q.size else 0
        what = f"sequence {q} has {seq_len_Q[q]}" if seq_len_Q.size else "there is none"
        raise InputError(f"every trace needs a sequence, and every sequence a token, but {what}; leave empty ones out.")
    # The sum of huge lengths may overflow int64.
    if seq_len_Q.max() > num_tokens or seq_len_Q.sum() != num_tokens:
        total = sum(seq_len_Q.tolist())
        raise InputError(f"{len(seq_len_Q)} sequences sum to {total} but there are {num_tokens} tokens; correct seq_len_Q.")
    return seq_len_Q


def checked_ids(topk_TLK: Array, known_T: Array | None, num_experts: int) -> Array:
    """Returns expert ids as uint8 or int16 [T, L, K]. Raises InputError if an id of a known token is invalid or repeated."""
    info = np.iinfo(np.uint8) if num_experts <= 256 else np.iinfo(np.int16)
    dtype = info.dtype
    if topk_TLK.dtype == dtype or (topk_TLK.min() >= info.min and topk_TLK.max() <= info.max):
        out = frozen_array(topk_TLK, dtype, "topk_TLK")
        _raise_first_fault(out, topk_TLK, known_T, num_experts)
        return out
    # Ids are clipped to one beyond either end, so that ids out of range remain out of range and fit int16.
    clipped_TLK = np.minimum(topk_TLK, topk_TLK.dtype.type(num_experts))
    if topk_TLK.dtype.kind == "i":
        clipped_TLK = np.maximum(clipped_TLK, topk_TLK.dtype.type(-1))
    _raise_first_fault(frozen_array(clipped_TLK, np.int16, "topk_TLK"), topk_TLK, known_T, num_experts)
    low, high = topk_TLK.min(), topk_TLK.max()
    raise InputError(f"tokens marked unknown hold ids from {low} to {high}, which {dtype} cannot hold; write 0 there.")


def _raise_first_fault(checked_TLK: Array, shown_TLK: Array, known_T: Array | None, num_experts: int) -> None:
    known = frozen_array(np.empty(0, np.bool_) if known_T is None else known_T, np.bool_, "known_T")
    t, layer, k = first_fault(checked_TLK, known, num_experts)
    if t < 0:
        return
    ids, where = shown_TLK[t, layer].tolist(), f"token {t}, layer {layer}"
    if 0 <= ids[k] < num_experts:
        raise InputError(f"{where} lists expert {ids[k]} twice ({ids}); mark such tokens unknown in known_T.")
    cure = "correct num_experts, or mark it unknown in known_T"
    raise InputError(f"{where} lists expert {ids[k]}, outside 0 to {num_experts - 1}; {cure}.")


@kernel
def first_fault(topk_TLK, known_T, num_experts):
    """Returns (token, layer, position) of the first invalid or repeated id in a known token, or (-1, -1, -1).

    If `known_T` is empty, all tokens are known.
    """
    num_tokens, num_layers, num_topk = topk_TLK.shape
    seen_in_row_E = np.full(num_experts, -1, np.int64)
    for t in range(num_tokens):
        if known_T.size and not known_T[t]:
            continue
        for layer in range(num_layers):
            row = t * num_layers + layer
            for k in range(num_topk):
                e = np.int64(topk_TLK[t, layer, k])
                if e < 0 or e >= num_experts or seen_in_row_E[e] == row:
                    return t, layer, k
                seen_in_row_E[e] = row
    return -1, -1, -1
