// Writes numbers for people.

export const count = (value) => Number(value).toLocaleString("en-US");

/** A rate or a mean, with as many digits as it deserves. */
export function figure(value) {
  if (value >= 1000) return count(Math.round(value));
  if (value >= 100) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** Seconds, as milliseconds below 10 s. */
export function duration(seconds) {
  return seconds >= 10 ? `${figure(seconds)} s` : `${figure(seconds * 1e3)} ms`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

/** How long ago, in words. */
export function ago(seconds) {
  return seconds < 90 ? `${Math.max(0, Math.round(seconds))} s ago` : `${Math.round(seconds / 60)} min ago`;
}

/**
 * Hundredths of a millisecond of each part, rounded so that they add up to the rounded whole: each is rounded down, and
 * those that lost most get one more.
 */
export function hundredths(partsSeconds, wholeSeconds) {
  const exact = partsSeconds.map((seconds) => seconds * 1e5);
  const rounded = exact.map(Math.floor);
  let left = Math.round(wholeSeconds * 1e5) - rounded.reduce((sum, value) => sum + value, 0);
  const order = exact.map((value, index) => [value - rounded[index], index]).sort((a, b) => b[0] - a[0]);
  for (let turn = 0; left !== 0 && order.length && turn < 2 * order.length; turn += 1) {
    rounded[order[turn % order.length][1]] += Math.sign(left);
    left -= Math.sign(left);
  }
  return rounded;
}
