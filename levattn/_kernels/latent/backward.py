"""Gradients of latent attention, compiled: each run of rows once more, and then from its end; see `compiled`."""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import VECTOR_BYTES, helper, jit
from levattn._kernels.latent.compiled import (
    BESIDE,
    D_BESIDE,
    D_GATE,
    D_Q,
    D_Y,
    FOLD,
    GATE,
    PLAIN,
    ROWS,
    SINGLE,
    SLACK,
    Q,
    add_rows,
    copy_rows,
    enter,
    fill_row,
    fold_gain,
    grow_and_read,
    grow_tiles,
    is_due,
    place_of,
    raise_references,
    read_positions,
    read_tiles,
    rescale,
    scale_columns,
    scale_rows,
    write_positions,
    write_rows,
)
from levattn._kernels.latent.simd import (
    copy_vectors,
    differs,
    dot_vectors,
    exceeds,
    exp_row,
    key_row,
    query_row,
    weigh_row,
)
from levattn._kernels.llvm import address, as_pointer, smaller
from levattn._kernels.rows.compiled import copy_numbers
from levattn._kernels.scratch import empty

__all__ = ["backward_tasks"]


@helper
def _sweep_back(like, enters, e, c, x, z, r_at, v_at, p_at, n, rho_at, wide, deep, R_at, T_at):
    """Take a segment of rows into the states of later rows, from the last to the first; its positions read them.

    The states are ``R_l = Σ c dY`` (wide, deep), its transpose, and rho, the sum of the rows at `r_at`. A position
    reads ``Σ_l e R_l`` to its row at `v_at`, and ``e (⟨V, R_l⟩ − rho)`` to that at `p_at`.
    """
    size = like.itemsize
    de, dx, end = wide * size, deep * size, n - 1
    vectors = wide // (VECTOR_BYTES // size)
    c, z, e, x = c + end * de, z + end * dx, e + end * de, x + end * dx
    if enters:
        fill_row(like, v_at, n * deep, 0)
        fill_row(like, p_at, n * wide, 0)
        grow_and_read(like, c, -de, z, -dx, e, -de, v_at + end * dx, -dx, n, R_at, wide, deep)
        grow_and_read(like, z, -dx, c, -de, x, -dx, p_at + end * de, -de, n, T_at, deep, wide)
    else:
        grow_tiles(like, c, -de, z, -dx, c, -de, z, -dx, n, R_at, wide, deep)
        grow_tiles(like, z, -dx, c, -de, z, -dx, c, -de, n, T_at, deep, wide)
    for i in range(end, -1, -1):  # without positions what is written here is not read
        key_row(like, e + (i - end) * de, p_at + i * de, rho_at, r_at + i * de, vectors)


@jit
def backward_tasks(
    like,
    flag,
    views,
    latents,
    channels,
    ahead,
    enters,
    lead,
    tasks,
    runs,
    places,
    before_m,
    before_s,
    before_S,
    room,
    wide_room,
    first,
    last,
):
    """Write the gradients of tasks (head, first position of a sequence, after the last, its first run, after them).

    Runs are (first row, row after the last, first position, place); `before_m`, `before_s` and `before_S` are the
    states before them, as in `forward_tasks`. The first `lead` positions of a sequence are in these states, and all
    rows read them.
    """
    size = like.itemsize
    lanes = VECTOR_BYTES // size
    wide, deep = -(-latents // lanes) * lanes, -(-channels // lanes) * lanes
    vectors, de, dx = wide // lanes, wide * size, deep * size
    reference, base, limit, total, factors, held, rho, idle, gain = room[: 9 * wide].reshape(9, wide)
    kept_factors, wide_total = wide_room[: 2 * wide].reshape(2, wide)
    wide_state = wide_room[2 * wide :][: wide * deep].reshape(deep, wide)
    limit_at, base_at, total_at, rho_at = address(limit), address(base), address(total), address(rho)
    states = room[SINGLE * wide :][: 4 * wide * deep]
    M = states[: wide * deep].reshape(deep, wide)  # Σ e V of the latents, transposed
    R = states[wide * deep : 2 * wide * deep].reshape(wide, deep)
    T = states[2 * wide * deep : 3 * wide * deep].reshape(deep, wide)
    gains = states[3 * wide * deep :].reshape(deep, wide)
    M_at, R_at, T_at, gains_at = address(M), address(R), address(T), address(gains)
    e_at = address(room) + (SINGLE * wide + 4 * wide * deep) * size
    p_at = e_at + ROWS * de
    inverse_at = p_at + ROWS * de
    g_at = inverse_at + ROWS * de
    x_at = g_at + ROWS * de
    z_at = x_at + ROWS * dx
    v_at = z_at + ROWS * dx
    kept = room[SINGLE * wide + 4 * wide * deep + ROWS * (4 * wide + 3 * deep) :]
    longest = (len(kept) // wide - 1) // 3
    c_at = address(kept)  # c of every row of a run, then c g / s, then the references of segments
    r_at = c_at + longest * de
    references = kept[2 * longest * wide :][: (longest + 1) * wide].reshape(longest + 1, wide)
    zero = like.dtype.type(0)
    segments = empty(0, (longest, 3))  # first row, number of rows, place of the references
    least = like.dtype.type(-np.inf)
    for task in range(first, last):
        head, begin, end, early, late = tasks[task]
        R[:] = 0
        T[:] = 0
        rho[:] = 0
        held[:] = -np.inf
        for run in range(late - 1, early - 1, -1):
            low, high, _, before = runs[run]
            before += head * places
            fresh = enter(before_m, before_s, before, SLACK, reference, base, limit, total, wide_total, kept_factors)
            wide_state[:] = 0
            if len(before_m):
                for k in range(latents):
                    for j in range(channels):
                        wide_state[j, k] = before_S[before, k, j]
            copy_numbers(wide_state, M)
            gains[:] = 0
            gain[:] = 0
            copy_numbers(reference, references[0])
            place, count = 0, 0
            for start in range(low, high, ROWS):
                n = smaller(ROWS, high - start)
                folds = is_due(enters and size == 4, fresh, start - low, high - low)
                if folds and start - low == PLAIN and fresh:
                    copy_numbers(total, wide_total)
                    copy_numbers(M, wide_state)
                if enters:
                    position = start + ahead
                    read_positions(
                        like, flag, views, head, position, n, begin, latents, channels, e_at, wide, x_at, deep
                    )
                skip = (start - low) * de
                copy_rows(like, place_of(views, Q, head, start), views[Q, 2], n, latents, -np.inf, c_at + skip, wide)
                copy_rows(like, place_of(views, D_Y, head, start), views[D_Y, 2], n, channels, 0, z_at, deep)
                fill_row(like, g_at, n * wide, 0)
                done = 0
                while done < n:
                    i = done
                    if enters and exceeds(like, e_at + i * de, limit_at, vectors):
                        logits = room[(e_at + i * de - address(room)) // size :][:wide]
                        raise_references(logits, SLACK, reference, base, limit, total, factors)
                        rescale(factors, M, True, folds, kept_factors, gain, gains)
                        place += 1
                        copy_numbers(reference, references[place])
                    while i < n:
                        if enters:
                            if i > done and exceeds(like, e_at + i * de, limit_at, vectors):
                                break
                            exp_row(like, e_at + i * de, base_at, total_at, vectors)
                        gate = least
                        if views[GATE, 0] != 0:
                            gate = as_pointer(place_of(views, GATE, head, start + i), like)[0]
                        at = c_at + skip + i * de
                        p = weigh_row(like, True, at, total_at, gate, vectors, p_at + i * de, inverse_at + i * de)
                        if not differs(like, z_at + i * dx, zero, deep // lanes):  # of no weight: a masked row, say
                            fill_row(like, at, wide, 0)
                            fill_row(like, p_at + i * de, wide, 0)
                            p = zero
                        as_pointer(v_at, like)[i] = p
                        i += 1
                    e, x, z, g = e_at + done * de, x_at + done * dx, z_at + done * dx, g_at + done * de
                    if enters:
                        grow_and_read(like, x, dx, e, de, z, dx, g, de, i - done, M_at, deep, wide)
                        if folds:
                            grow_tiles(like, x, dx, e, de, x, dx, e, de, i - done, gains_at, deep, wide)
                            add_rows(like, e, i - done, gain)
                    else:
                        read_tiles(like, z, dx, g, de, z, dx, g, de, i - done, M_at, deep, wide)
                    segments[count, 0], segments[count, 1], segments[count, 2] = start + done, i - done, place
                    count += 1
                    done = i
                if folds and (start + n - low) % FOLD == 0:
                    fold_gain(like, kept_factors, gain, total, wide_total, gains, M, wide_state, True)
                for i in range(n):
                    row = start + i
                    at = c_at + skip + i * de
                    mean = dot_vectors(like, at, g_at + i * de, vectors)
                    if views[GATE, 0] != 0:
                        p = as_pointer(v_at, like)[i]
                        z = z_at + i * dx
                        copy_rows(like, place_of(views, BESIDE, head, row), 0, 1, channels, 0, x_at, deep)
                        beside = dot_vectors(like, x_at, z, deep // lanes) if p != 0 else p
                        mean += p * beside
                        as_pointer(place_of(views, D_GATE, head, row), like)[0] = p * (beside - mean)
                        dY, out = as_pointer(z, like), as_pointer(place_of(views, D_BESIDE, head, row), like)
                        for j in range(channels):
                            out[j] = p * dY[j]
                    query_row(like, at, g_at + i * de, p_at + i * de, inverse_at + i * de, mean, vectors)
                write_rows(like, p_at, wide, n, latents, place_of(views, D_Q, head, start), views[D_Q, 2])
                copy_vectors(like, g_at, r_at + skip, n * vectors)
            for k in range(count - 1, -1, -1):
                start, n = segments[k, 0], segments[k, 1]
                if k == count - 1 or segments[k, 2] != segments[k + 1, 2]:
                    now = references[segments[k, 2]]
                    for j in range(wide):
                        factors[j] = 1 if held[j] == now[j] or held[j] == -np.inf else np.exp(now[j] - held[j])
                        held[j] = now[j]
                        base[j] = 0 if now[j] == -np.inf else now[j]
                        rho[j] *= factors[j]
                    scale_rows(R, factors)
                    scale_columns(T, factors)
                position = start + ahead
                if enters:
                    read_positions(
                        like, flag, views, head, position, n, begin, latents, channels, e_at, wide, x_at, deep
                    )
                    for i in range(n):
                        exp_row(like, e_at + i * de, base_at, address(idle), vectors)
                copy_rows(like, place_of(views, D_Y, head, start), views[D_Y, 2], n, channels, 0, z_at, deep)
                skip = (start - low) * de
                _sweep_back(
                    *(like, enters, e_at, c_at + skip, x_at, z_at, r_at + skip, v_at, p_at),
                    *(n, rho_at, wide, deep, R_at, T_at),
                )
                if enters:
                    write_positions(
                        like, flag, views, head, position, n, begin, latents, channels, p_at, wide, v_at, deep
                    )
        fill_row(like, g_at, wide, 0)
        for start in range(begin, smaller(begin + lead, end), ROWS):
            n = smaller(ROWS, smaller(begin + lead, end) - start)
            read_positions(like, flag, views, head, start, n, begin, latents, channels, e_at, wide, x_at, deep)
            for i in range(n):
                exp_row(like, e_at + i * de, base_at, address(idle), vectors)
            fill_row(like, v_at, n * deep, 0)
            fill_row(like, p_at, n * wide, 0)
            read_tiles(like, e_at, de, v_at, dx, e_at, de, v_at, dx, n, R_at, wide, deep)
            read_tiles(like, x_at, dx, p_at, de, x_at, dx, p_at, de, n, T_at, deep, wide)
            for i in range(n):
                key_row(like, e_at + i * de, p_at + i * de, rho_at, g_at, vectors)
            write_positions(like, flag, views, head, start, n, begin, latents, channels, p_at, wide, v_at, deep)
