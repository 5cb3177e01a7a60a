// Makes tables of more than two rows sortable by their columns, and adds a filter by words to long tables.
(function () {
  "use strict";
  var units = { B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824, TiB: 1099511627776 };

  function key(text) {
    var number = /^(-?[\d.]+(?:e[+-]?\d+)?)(?: ?(B|KiB|MiB|GiB|TiB|%))?$/.exec(text);
    return number ? Number(number[1]) * (units[number[2]] || 1) : text;
  }

  function filterable(table, rows) {
    var place = document.createElement("p"), label = document.createElement("label");
    var input = document.createElement("input"), count = document.createElement("span");
    place.className = "search small";
    count.className = "muted";
    count.setAttribute("role", "status");
    input.type = "search";
    input.autocomplete = "off";
    label.append("Filter ", input);
    place.append(label, " ", count);
    table.parentNode.before(place);
    function filter() {
      var words = input.value.toLowerCase().split(/\s+/).filter(Boolean), shown = 0;
      rows.forEach(function (row) {
        var text = row.textContent.toLowerCase();
        row.hidden = !words.every(function (word) { return text.indexOf(word) >= 0; });
        shown += !row.hidden;
      });
      count.textContent = shown + " of " + rows.length;
    }
    input.addEventListener("input", filter);
    filter();
  }

  document.querySelectorAll("main table").forEach(function (table) {
    var rows = Array.from(table.tBodies[0].rows);
    if (rows.length > 2) { sortable(table, rows, key); }
    if (rows.length > 20) { filterable(table, rows); }
  });
})();
