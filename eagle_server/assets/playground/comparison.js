// The same request with and without speculation, again and again, and what the speeds of these runs say.
//
// A pair of runs is [speculative, plain], two answers.

import { Answer } from "./answer.js";

export const PAIRS = 5; // at most
const MEASURING_MS = 15_000; // no pair begins that would end later, if it took as long as the last one

/** Run pairs, the other one first each time. took: milliseconds that one took before. take(answer, speculative) runs one. */
export async function* repeats(take, took) {
  const end = performance.now() + MEASURING_MS;
  for (let number = 0; number < PAIRS && performance.now() + took < end; number++) {
    const began = performance.now();
    const pair = [new Answer(), new Answer()];
    for (const place of number % 2 ? [0, 1] : [1, 0]) await take(pair[place], place === 0);
    took = performance.now() - began;
    yield pair;
  }
}

/** The median speeds of pairs, [speculative, plain]. */
export const speeds = (pairs) => [0, 1].map((place) => median(pairs.map((pair) => pair[place].speed)));

/**
 * What pairs say about speed: {ratio, note, className}. ratio: of the median speeds, null where more was measured than drafts
 * can gain. expected: the engine's own, undefined where it has none. The note names no cause: the runs do not show one.
 */
export function comparison(pairs, expected) {
  const [ours, theirs] = speeds(pairs);
  const ratio = ours / theirs;
  const ratios = pairs.map(([speculative, plain]) => speculative.speed / plain.speed);
  const [least, most] = [Math.min(...ratios), Math.max(...ratios)];
  const perCycle = median(pairs.map(([speculative]) => speculative.meanLength));
  const spread = pairs.length === 1 ? "one pair of runs" : `${pairs.length} pairs of runs, ${times(least)} to ${times(most)} ×`;
  const measured = `the speed of plain decoding, in engine time: ${spread}`;
  const unsure = (why, shown = ratio) => ({ ratio: shown, note: `${why}: the runs vary too much on this machine to tell`, className: "" });
  if (ratio > perCycle) return unsure(`${times(ratio)} × ${measured}, above ${times(perCycle)} tokens per cycle`, null);
  if (least < 1 && most > 1) return unsure(measured);
  if (expected && (ratio - 1) * (expected - 1) < 0) return unsure(`${measured}; the engine expects ${times(expected)} ×`);
  return { ratio, note: measured, className: least >= 1 && pairs.length > 1 ? "good" : "" };
}

const times = (factor) => factor.toFixed(2);

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
