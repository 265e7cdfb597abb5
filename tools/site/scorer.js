// The order of search results: a page that shows how comes before one that lists, records or measures.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score]) => {
    const places = [
      [/how-to\/migrating/, 1.5],
      [/docs\/how-to\/|docs\/tutorial/, 4],
      [/docs\/arguments|tr-[a-z]+\/README|docs\/(launching|sharding|deepspeed|hangs)/, 1.5],
      [/CHANGELOG|\/adr\/|\/bench\/|^tests\/|docs\/(tests|tested|equality|performance|what-libraries-use)/, 0.2],
    ];
    const found = places.find(([pattern]) => pattern.test(page));
    return score * (found ? found[1] : 1);
  },
};
