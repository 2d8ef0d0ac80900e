"use strict";
// Where lanes come from: a simulated stage (uses and copies), or the copies that engines measured.
// Letters: U uses, G ranks, C copies, A gradient returns, V events.

const PHASES = ["forward", "backward", "re-forward"];
const SIM_KINDS = ["attention", "dispatch", "compute", "combine", "weights", "wait", "again", "peer", "rdma", "host", "gradient"];
const [ATTENTION, DISPATCH, COMPUTE, COMBINE, WEIGHTS, WAIT, AGAIN, PEER] = SIM_KINDS.keys();
const GRADIENT = SIM_KINDS.indexOf("gradient");
const MAX_LEVELS = 4;

/** Spans of every rank, sorted by start, each on the first level that is free (at most MAX_LEVELS). */
class SpansByRank {
  constructor(rank_X, start_X, end_X, numRanks) {
    const count = new Int32Array(numRanks + 1), X = rank_X.length;
    for (let i = 0; i < X; i++) if (rank_X[i] >= 0) count[rank_X[i] + 1]++;
    for (let g = 0; g < numRanks; g++) count[g + 1] += count[g];
    Object.assign(this, { first: count, start_X, end_X, longest: new Float64Array(numRanks), levels: new Uint8Array(numRanks).fill(1) });
    this.order = new Int32Array(count[numRanks]);
    this.level = new Uint8Array(count[numRanks]);
    const next = count.slice();
    for (let i = 0; i < X; i++) if (rank_X[i] >= 0) this.order[next[rank_X[i]]++] = i;
    for (let g = 0; g < numRanks; g++) this.settle(g);
  }

  settle(g) {
    const mine = this.order.subarray(this.first[g], this.first[g + 1]).sort((a, b) => this.start_X[a] - this.start_X[b] || a - b), free = new Float64Array(MAX_LEVELS).fill(-1);
    mine.forEach((i, k) => {
      let level = free.findIndex((until) => until <= this.start_X[i] + 1e-9);
      if (level < 0) level = MAX_LEVELS - 1;
      free[level] = this.end_X[i];
      this.level[this.first[g] + k] = level;
      this.levels[g] = Math.max(this.levels[g], level + 1);
      this.longest[g] = Math.max(this.longest[g], this.end_X[i] - this.start_X[i]);
    });
  }

  each(g, from, to, emit) {
    let low = this.first[g], high = this.first[g + 1];
    const until = high;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start_X[this.order[middle]] < from - this.longest[g]) low = middle + 1; else high = middle;
    }
    for (let k = low; k < until; k++) {
      const i = this.order[k];
      if (this.start_X[i] > to) break;
      if (this.end_X[i] >= from) emit(this.start_X[i], this.end_X[i], i, this.level[k]);
    }
  }
}

class SimulatedSource {
  constructor(rows, arrays) {
    const t = facts.timeline, tick = t.tick_s, U = arrays.use_start_U.length, G = facts.G;
    Object.assign(this, { rows, arrays, U, G, kinds: SIM_KINDS, total: t.total_s, ranks: [...Array(G).keys()], copies: t.copies, tick });
    const whole_U = (name) => arrays[`use_${name}_U`];
    this.at = ["start", "window", "dispatched", "ready", "computed", "end"].map(() => new Float64Array(U));
    this.latest_U = new Float64Array(U);
    for (let u = 0; u < U; u++) {
      this.at[0][u] = whole_U("start")[u] * tick;
      ["window", "dispatched", "ready", "computed", "end"].forEach((name, k) => { this.at[k + 1][u] = this.at[k][u] + whole_U(name)[u] * tick; });
      let most = 0;
      for (let g = 0; g < G; g++) most = Math.max(most, arrays.use_window_UG[u * G + g]);
      this.latest_U[u] = most * tick;
    }
    this.names = [["attention", "attention"], ["dispatch", "tokens to experts"], ["compute", "expert compute"], ["combine", "tokens back"], ["weights", "waiting for weights"], ["wait", "waiting for other ranks"]];
    if (t.copies) this.names.push(["peer", "copy by peer link"], ["rdma", "by RDMA"], ["host", "from host"], ["gradient", "gradient home"]);
    if (t.again_L.some(Boolean)) this.names.splice(6, 0, ["again", "re-forward"]);
  }

  /** Copies are sorted on first use, so that the page opens without waiting for that. */
  spans() {
    if (this.into) return this;
    const a = this.arrays, C = a.copy_use_C.length, A = a.return_start_A.length, X = C + A, tick = this.tick;
    const dst = new Int32Array(X), src = new Int32Array(X), start = new Float64Array(X), end = new Float64Array(X);
    for (let c = 0; c < C; c++) {
      dst[c] = a.rank_Y[a.copy_replica_C[c]];
      src[c] = a.copy_source_C[c];
      start[c] = (a.use_start_U[a.copy_use_C[c]] + a.copy_start_C[c]) * tick;
      end[c] = start[c] + a.copy_length_C[c] * tick;
    }
    for (let i = 0; i < A; i++) {
      const y = a.return_replica_A[i];
      src[C + i] = a.rank_Y[y];
      dst[C + i] = a.home_rank_LE[(this.rows.rowOf_Y[y] % facts.L) * facts.E + a.expert_Y[y]];
      start[C + i] = a.return_start_A[i] * tick;
      end[C + i] = start[C + i] + a.return_length_A[i] * tick;
    }
    return Object.assign(this, { C, start, end, into: new SpansByRank(dst, start, end, this.G), out: new SpansByRank(src, start, end, this.G) });
  }

  kindOf(i) { return i >= this.C ? GRADIENT : PEER + this.arrays.copy_path_C[i]; }

  /** The use that runs at a time, or the next one. */
  useAt(t) {
    let low = 0, high = this.U;
    while (low < high) { const middle = (low + high) >> 1; if (this.at[5][middle] <= t) low = middle + 1; else high = middle; }
    return Math.min(low, this.U - 1);
  }

  /** Emits a rank's own work in [from, to]. */
  work(g, from, to, emit) {
    for (let u = this.useAt(from); u < this.U && this.at[0][u] - this.latest_U[u] <= to; u++) this.workOf(u, g, emit);
  }

  workOf(u, g, emit) {
    const [start, window, dispatched, ready, computed, end] = this.at, a = this.arrays;
    const backward = a.use_phase_U[u] === 1, again = backward && facts.timeline.again_L[a.use_layer_U[u]];
    const share = again ? facts.timeline.backward_ratio / (1 + facts.timeline.backward_ratio) : 1;
    const attention = a.use_window_UG[u * this.G + g] * this.tick * share, compute = a.use_compute_UG[u * this.G + g] * this.tick * share;
    if (!backward) {
      const begin = Math.min(start[u], window[u] - attention);
      emit(begin, begin + attention, ATTENTION, 0);
      emit(begin + attention, window[u], WAIT, 0);
    } else emit(start[u], window[u], again ? AGAIN : WEIGHTS, 0);
    const first = Math.min(dispatched[u] + a.use_wait_UG[u * this.G + g] * this.tick, ready[u]);
    emit(window[u], dispatched[u], DISPATCH, 0);
    emit(dispatched[u], first, WEIGHTS, 0);
    emit(first, Math.min(first + compute, computed[u]), COMPUTE, 0);
    emit(first + compute, computed[u], WAIT, 0);
    const back = backward ? Math.max(end[u] - this.latest_U[u] * share, computed[u]) : end[u];
    emit(computed[u], back, COMBINE, 0);
    if (backward) { emit(back, back + attention, ATTENTION, 0); emit(back + attention, end[u], WAIT, 0); }
  }

  /** Seconds of every kind of work of a rank before each use. Cached, because whole stages are drawn from them. */
  sums(g) {
    this.sums_G ??= new Array(this.G);
    if (this.sums_G[g]) return this.sums_G[g];
    const sums = new Float64Array((this.U + 1) * PEER), [start, , , , , end] = this.at;
    for (let u = 0; u < this.U; u++) {
      for (let k = 0; k < PEER; k++) sums[(u + 1) * PEER + k] = sums[u * PEER + k];
      this.workOf(u, g, (a, b, kind) => { sums[(u + 1) * PEER + kind] += Math.max(Math.min(b, end[u]) - Math.max(a, start[u]), 0); });
    }
    return (this.sums_G[g] = sums);
  }

  /** Fills the share of every kind in `columns` stretches of [from, to]; returns false if uses are wide enough to be drawn one by one. */
  shares(g, from, to, columns, out, K) {
    const [start, , , , , end] = this.at, first = this.useAt(from), each = (to - from) / columns;
    if (this.useAt(to) - first < columns) return false;
    const sums = this.sums(g), before = new Float64Array(PEER);
    for (let c = 0, u = first; c <= columns; c++) {
      const t = from + c * each;
      while (u < this.U - 1 && end[u] <= t) u++;
      const part = Math.min(Math.max((t - start[u]) / (end[u] - start[u] || 1), 0), 1);
      for (let k = 0; k < PEER; k++) {
        const at = u * PEER + k, now = sums[at] + part * (sums[at + PEER] - sums[at]);
        if (c > 0) out[(c - 1) * K + k] = (now - before[k]) / each;
        before[k] = now;
      }
    }
    return true;
  }

  /** Lanes of some ranks; `links`: with copies into and out of each. */
  lanes(ranks, links) {
    const lanes = [], high = ranks.length > 32 ? Math.max(1, Math.min(9, Math.floor(640 / ranks.length))) : 16;
    const step = indexTicks(ranks.length, high + 1, 12)[1] || 1;
    let top = LANES.top;
    ranks.forEach((g, k) => {
      const name = links || k % step === 0 ? `rank ${g}` : null;
      lanes.push({ label: name, strong: true, rank: g, top, height: high, levels: 1, each: (from, to, emit) => this.work(g, from, to, emit),
        shares: (from, to, columns, out, K) => this.shares(g, from, to, columns, out, K) });
      top += high + 1;
      if (links && this.copies) {
        const spans = this.spans();
        for (const [way, title] of [["into", "in"], ["out", "out"]]) {
          const small = ranks.length > 32 ? 4 : 10;
          lanes.push({ label: ranks.length > 32 ? null : title, rank: g, way, top, height: small, levels: spans[way].levels[g],
            each: (from, to, emit) => spans[way].each(g, from, to, (start, end, i, level) => emit(start, end, this.kindOf(i), level)) });
          top += small + 1;
        }
        top += ranks.length > 32 ? 2 : 6;
      }
    });
    return lanes;
  }

  /** Uses (or passes, if uses are narrow) as named stretches above the lanes. */
  bands([from, to], wide) {
    const list = [], a = this.arrays, first = this.useAt(from), last = this.useAt(to), narrow = (last - first + 1) * 70 > wide;
    for (let u = first; u <= last; u++) {
      const m = a.use_micro_step_U[u], phase = a.use_phase_U[u], before = list[list.length - 1];
      if (narrow && before && before.m === m && before.phase === phase) { before.to = this.at[5][u]; continue; }
      const l = a.use_layer_U[u], n = m * facts.L + l, verb = ["fwd", "bwd", "re-fwd"][phase];
      list.push({ m, phase, from: this.at[0][u], to: this.at[5][u], odd: narrow ? list.length % 2 : u % 2, short: narrow ? String(m) : `${m}, ${l} ${verb}`,
        name: narrow ? `micro-step ${m} ${PHASES[phase]}` : `${n === state.row ? "▸ " : ""}micro-step ${m}, layer ${l} ${verb}` });
    }
    return list;
  }

  /** Window around the forward use of a row. */
  around(n) {
    const a = this.arrays, m = Math.floor(n / facts.L), l = n % facts.L;
    let u = 0;
    while (u < this.U - 1 && !(a.use_micro_step_U[u] === m && a.use_layer_U[u] === l && a.use_phase_U[u] === 0)) u++;
    return [this.at[0][Math.max(u - 1, 0)], this.at[5][Math.min(u + 2, this.U - 1)]];
  }

  describe(lane, t) {
    const g = lane.rank, list = [];
    if (lane.way) {
      this[lane.way].each(g, t, t, (start, end, i) => { if (list.length < 4) list.push(this.copyWords(i, end - start)); });
      return list.join("\n") || `rank ${g}: no copy`;
    }
    this.work(g, t, t, (start, end, kind) => { if (start <= t && t < end) list.push(`${this.names.find(([k]) => k === SIM_KINDS[kind])?.[1] ?? SIM_KINDS[kind]}, ${seconds(end - start)}`); });
    const u = this.useAt(t), a = this.arrays;
    return `rank ${g}, ${rowName(a.use_micro_step_U[u] * facts.L + a.use_layer_U[u])}, ${PHASES[a.use_phase_U[u]]}\n${list[list.length - 1] || "outside the layers"}`;
  }

  copyWords(i, length) {
    const y = i >= this.C ? this.arrays.return_replica_A[i - this.C] : this.arrays.copy_replica_C[i], r = this.rows.replica(y);
    const row = rowName(r.n);
    if (i >= this.C) return `gradient of expert ${r.expert}, rank ${r.rank} to ${r.home}, ${row}, ${seconds(length)}`;
    const source = this.arrays.copy_source_C[i];
    return `expert ${r.expert}, ${source < 0 ? "host" : `rank ${source}`} to rank ${r.rank}, ${row}, ${seconds(length)}`;
  }
}

class MeasuredSource {
  constructor(arrays) {
    const t = facts.timeline, tick = t.tick_s, V = arrays.event_rank_V.length;
    const colours = ["peer", "host", "rdma", "held"];
    Object.assign(this, { arrays, total: t.total_s, ranks: t.ranks, copies: true });
    this.kinds = [...t.backends.map((_, i) => colours[i % colours.length]), "weights"];
    this.names = [...t.backends.map((name, i) => [this.kinds[i], `by ${name}`]), ["weights", "rank stalls for it"]];
    const start = Float64Array.from(arrays.event_start_V, (v) => v * tick), end = start.map((s, i) => s + arrays.event_length_V[i] * tick);
    const still = end.map((s, i) => s - arrays.event_exposed_V[i] * tick);
    const only = (gradient) => arrays.event_rank_V.map((rank, i) => (arrays.event_gradient_V[i] === gradient ? rank : -1));
    this.parts = {
      weights: new SpansByRank(only(0), start, end, facts.G), gradients: new SpansByRank(only(1), start, end, facts.G),
      waits: new SpansByRank(arrays.event_rank_V.map((rank, i) => (arrays.event_exposed_V[i] > 0 ? rank : -1)), still, end, facts.G),
    };
    this.V = V;
  }

  lanes(ranks) {
    const lanes = [], named = { weights: "weights in", gradients: "gradients in", waits: "stalls" }, high = ranks.length > 8 ? 9 : 18;
    let top = LANES.top;
    for (const g of ranks) {
      for (const [part, title] of Object.entries(named)) {
        const spans = this.parts[part];
        lanes.push({ label: part === "weights" ? `rank ${g}` : null, strong: true, title, part, rank: g, top, height: part === "waits" ? high / 2 : high, levels: spans.levels[g],
          each: (from, to, emit) => spans.each(g, from, to, (start, end, i, level) => emit(start, end, part === "waits" ? this.kinds.length - 1 : this.arrays.event_backend_V[i], level)) });
        top += (part === "waits" ? high / 2 : high) + 1;
      }
      top += 6;
    }
    return lanes;
  }

  bands() { return []; }

  around(n) {
    const a = this.arrays, m = Math.floor(n / facts.L), l = n % facts.L;
    let from = Infinity, to = 0;
    for (let i = 0; i < this.V; i++) {
      if (a.event_micro_step_V[i] !== m || a.event_layer_V[i] !== l) continue;
      from = Math.min(from, a.event_start_V[i]);
      to = Math.max(to, a.event_start_V[i] + a.event_length_V[i]);
    }
    const tick = facts.timeline.tick_s, pad = (to - from) * 0.25;
    return from < to ? [Math.max((from - pad) * tick, 0), Math.min((to + pad) * tick, this.total)] : [0, this.total];
  }

  describe(lane, t) {
    const a = this.arrays, list = [];
    this.parts[lane.part].each(lane.rank, t, t, (start, end, i) => {
      if (list.length > 3) return;
      const source = a.event_src_rank_V[i] < 0 ? "host" : `rank ${a.event_src_rank_V[i]}`;
      list.push(`${a.event_gradient_V[i] ? "gradient of expert" : "expert"} ${a.event_expert_V[i]} from ${source}, ${rowName(a.event_micro_step_V[i] * facts.L + a.event_layer_V[i])}, ${bytes(a.event_bytes_V[i])} in ${seconds(a.event_length_V[i] * facts.timeline.tick_s)}, exposed ${seconds(a.event_exposed_V[i] * facts.timeline.tick_s)}, ${facts.timeline.outcomes[a.event_outcome_V[i]]}`);
    });
    return `rank ${lane.rank}, ${lane.title}\n${list.join("\n") || "none"}`;
  }
}
