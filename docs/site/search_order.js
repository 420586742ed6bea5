// Where pages have the same words, those that tell what to do come first, and troubleshooting before all.
const LATER = [
  [/^(benchmarks|examples|CHANGELOG|CONTRIBUTING|docs\/api|docs\/README|docs\/internals)/, 14],
  [/^README/, 6],
  [/^docs\/(reference|choose|compare)/, 5],
  [/^docs\/troubleshooting/, -1],
];
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    score - (LATER.find(([pattern]) => pattern.test(page)) ?? [null, 0])[1],
  // The other numbers are those of Sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
