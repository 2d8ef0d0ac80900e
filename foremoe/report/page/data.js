"use strict";
// Letters: M micro-steps, L layers, N = M*L rows (n = m*L + l), G ranks, E experts, Y replicas.

const TYPES = { uint8: Uint8Array, uint16: Uint16Array, int16: Int16Array, int32: Int32Array, float32: Float32Array };

/** Name of a row. Both numbers count from 0, as in `foremoe inspect --explain`. */
function rowName(n) {
  const l = n % facts.L;
  return `micro-step ${Math.floor(n / facts.L)}, layer ${l} (model layer ${facts.moe_layer_L[l]})`;
}

/** Label of the axis of layers. Layers of the plan count from 0. */
function layerAxis() {
  const more = facts.moe_layer_L[0];
  if (facts.moe_layer_L.some((number, l) => number !== l + more)) return "layer of the plan";
  return more === 0 ? "layer" : `layer (model layer: ${more} more)`;
}

/** The part of the job that the page's address names, or null. */
function partByAddress() {
  const part = Number(location.hash.match(/[#&]part=(\d+)/)?.[1] ?? NaN);
  return job !== null && part < job.parts.length ? part : null;
}

// Null unless the page shows a job, each part of which has its own block.
const job = JSON.parse(document.getElementById("job-facts").textContent);
const shownPart = job === null ? 0 : partByAddress() ?? job.slowest;
const blockName = (name) => (shownPart ? `${name}-${shownPart}` : name);
const facts = JSON.parse(document.getElementById(blockName("facts")).textContent);

/** Inflates the packed block and cuts it into named typed arrays. */
async function readArrays() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser cannot inflate the report's numbers (it lacks DecompressionStream); open the file in a browser of 2023 or later.");
  }
  const holder = document.getElementById(blockName("packed"));
  const packed = bytesOfBase64(holder.textContent);
  holder.textContent = "";
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const inflated = new Uint8Array(await new Response(stream).arrayBuffer());
  const arrays = {};
  for (const [name, entry] of Object.entries(facts.arrays)) arrays[name] = arrayOf(inflated, entry);
  return arrays;
}

function bytesOfBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** Reads one array. Its bytes are grouped by significance, lowest first, and may be differences. */
function arrayOf(inflated, entry) {
  const Type = TYPES[entry.dtype], width = Type.BYTES_PER_ELEMENT, count = entry.bytes / width;
  const bytes = new Uint8Array(entry.bytes);
  for (let w = 0; w < width; w++) {
    const plane = entry.offset + w * count;
    for (let i = 0, to = w; i < count; i++, to += width) bytes[to] = inflated[plane + i];
  }
  const values = new Type(bytes.buffer);
  if (entry.differences) for (let i = 1; i < count; i++) values[i] += values[i - 1];
  return values;
}

/** Loads and replicas of every row, from the packed arrays. */
class Rows {
  constructor(arrays) {
    const { M, L, G, E } = facts;
    Object.assign(this, { M, L, G, E, N: M * L, arrays });
    this.first_N = new Int32Array(this.N + 1);
    for (let n = 0; n < this.N; n++) this.first_N[n + 1] = this.first_N[n] + arrays.replicas_N[n];
    this.rowOf_Y = new Int32Array(this.first_N[this.N]);
    for (let n = 0; n < this.N; n++) this.rowOf_Y.fill(n, this.first_N[n], this.first_N[n + 1]);
    this.before_N = new Float32Array(this.N);
    this.after_N = new Float32Array(this.N);
    this.gap_N = new Float32Array(this.N);
    for (let n = 0; n < this.N; n++) {
      const { before_G, after_G, mean } = this.loads(n), bound = Math.max(arrays.load_bound_ML[n], 1);
      const most = Math.max(...after_G);
      this.before_N[n] = mean > 0 ? Math.max(...before_G) / mean : 1;
      this.after_N[n] = mean > 0 ? most / mean : 1;
      this.gap_N[n] = Math.max(most - bound, 0) / bound;
    }
  }

  /** Pairs that every rank serves with all experts at home and as planned, and their mean. */
  loads(n) {
    const { load_MLE, home_rank_LE, rank_Y, expert_Y, quota_Y } = this.arrays, l = n % this.L;
    const posed_rank_LE = this.arrays.posed_rank_LE || home_rank_LE, before_G = new Float64Array(this.G), after_G = new Float64Array(this.G);
    let total = 0;
    for (let e = 0; e < this.E; e++) {
      before_G[posed_rank_LE[l * this.E + e]] += load_MLE[n * this.E + e];
      after_G[home_rank_LE[l * this.E + e]] += load_MLE[n * this.E + e];
      total += load_MLE[n * this.E + e];
    }
    for (let y = this.first_N[n]; y < this.first_N[n + 1]; y++) {
      after_G[home_rank_LE[l * this.E + expert_Y[y]]] -= quota_Y[y];
      after_G[rank_Y[y]] += quota_Y[y];
    }
    return { before_G, after_G, mean: total / this.G, total };
  }

  /** Replica y in plain values. */
  replica(y) {
    const n = this.rowOf_Y[y], l = n % this.L, a = this.arrays, expert = a.expert_Y[y];
    const home = a.home_rank_LE[l * this.E + expert], rank = a.rank_Y[y], source = a.source_Y[y];
    const near = facts.node_of_rank_G[home] === facts.node_of_rank_G[rank];
    let way = source === -1 ? "host" : "held";
    if (source >= 0) way = facts.node_of_rank_G[source] === facts.node_of_rank_G[rank] ? "peer" : "rdma";
    return { y, n, m: Math.floor(n / this.L), l, expert, home, rank, way, near, quota: a.quota_Y[y], load: a.load_MLE[n * this.E + expert] };
  }

  replicas(n) {
    const list = [];
    for (let y = this.first_N[n]; y < this.first_N[n + 1]; y++) list.push(this.replica(y));
    return list;
  }

  /** The arcs of the chain through a rank: its sources and targets, their sources and targets, and so on. */
  chain(n, rank) {
    const list = this.replicas(n), found = new Set();
    for (const [from, to] of [["rank", "home"], ["home", "rank"]]) {
      const seen = new Set([rank]), open = [rank];
      while (open.length) {
        const at = open.pop();
        for (const replica of list) {
          if (replica[from] !== at) continue;
          found.add(replica.y);
          if (!seen.has(replica[to])) { seen.add(replica[to]); open.push(replica[to]); }
        }
      }
    }
    return found;
  }

  /** A sentence that says why a row has no replicas, or null if it has some. */
  reason(n) {
    if (this.first_N[n + 1] > this.first_N[n]) return null;
    if (!facts.executable) return "No expert is away from its home in this row.";
    if (facts.R === 0) return "No copies: the plan has no redundant slots (R = 0).";
    const a = this.arrays, w = a.best_row_W.indexOf(n);
    if (w < 0) return "No copies: the ranks are evenly loaded, so no copy would help.";
    const saved = a.best_saved_s_W[w], cost = a.best_cost_s_W[w], pays = saved > cost;
    return `No copies: ${pays ? "the planner left one that may pay off" : "none pays off"}. The best one tried, expert ${a.best_expert_W[w]} from rank ${a.best_from_W[w]} to ${a.best_to_W[w]} (${whole(a.best_quota_W[w])} pairs), ` +
      `${saved < 0 ? `adds ${seconds(-saved)} to` : `saves ${seconds(saved)} of`} experts and exchanges and adds ${seconds(cost)} of exposed weights and gradients (predicted).`;
  }

  /** Row with the largest value. */
  worst(values_N) {
    let best = 0;
    for (let n = 1; n < this.N; n++) if (values_N[n] > values_N[best]) best = n;
    return best;
  }
}
