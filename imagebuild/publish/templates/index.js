// The picker works as soon as this has run, even while the table below is still loading.
(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("data").textContent);
  var form = document.querySelector("form.facets"), sets = Array.from(form.querySelectorAll("fieldset"));
  var last = data.facets.length - 1, byDigest = false, all;
  var node = function (id) { return document.getElementById(id); };

  function chosen() {
    return sets.map(function (set) { return Number(set.querySelector("input:checked").value); });
  }
  function fits(row, wanted) {
    return wanted.every(function (value, i) {
      return value < 0 || (i === last ? (row[i + 1] >> value) & 1 : row[i + 1] === value);
    });
  }
  function any(wanted) { return data.rows.some(function (row) { return fits(row, wanted); }); }
  function withChoice(wanted, i, value) { var copy = wanted.slice(); copy[i] = value; return copy; }

  // Names the choice that excludes a value: one that the value never goes with, else all choices together.
  function exclusion(wanted, i, value) {
    var nothing = wanted.map(function () { return -1; }), all = [];
    for (var j = 0; j < wanted.length; j++) {
      if (j === i || wanted[j] < 0) { continue; }
      var name = data.facets[j][1] + " " + data.facets[j][2][wanted[j]];
      if (!any(withChoice(withChoice(nothing, i, value), j, wanted[j]))) { return name; }
      all.push(name);
    }
    return all.join(" and ");
  }
  function limit(wanted) {
    sets.forEach(function (set, i) {
      var reasons = {}, texts = [];
      set.querySelectorAll("input").forEach(function (input) {
        var value = Number(input.value), free = value < 0 || any(withChoice(wanted, i, value));
        input.disabled = !free;
        input.nextSibling.title = "";
        if (!free) {
          var why = exclusion(wanted, i, value);
          input.nextSibling.title = "not with " + why;
          (reasons[why] = reasons[why] || []).push(data.facets[i][2][value]);
        }
      });
      Object.keys(reasons).forEach(function (why) { texts.push("Not with " + why + ": " + reasons[why].join(", ")); });
      var note = set.querySelector(".not");
      note.textContent = texts.join(". ");
      note.hidden = !texts.length;
    });
  }
  function line(title, text, ready) {
    var row = document.createElement("div"), name = document.createElement("b"), code = document.createElement("code");
    var button = document.createElement("button"), away = document.createElement("span");
    row.className = "command";
    name.textContent = title;
    code.textContent = text;
    code.tabIndex = 0;
    button.type = "button";
    button.className = "copy";
    button.disabled = !ready;
    away.className = "away";
    away.textContent = " the command for " + title;
    button.append("Copy", away);
    row.append(name, code, button);
    return row;
  }
  function answer(wanted) {
    var found = data.rows.filter(function (row) { return fits(row, wanted); });
    var place = found[0][0], tag = data.tags[place], row = (all || document.querySelectorAll("tr[data-digest]"))[place];
    var digest = row && row.dataset.digest, named = byDigest || !tag;
    var reference = named ? "@sha256:" + (digest || "…") : ":" + tag;
    node("fits").textContent = found.length === 1 ? "This one fits." : "The newest of " + found.length + " that fit.";
    node("tag").textContent = data.facets[0][2][found[0][1]] + reference;
    node("page").href = row ? row.querySelector("a").getAttribute("href") : "#images";
    node("commands").replaceChildren.apply(node("commands"), data.commands[data.repositories[place]].map(function (one) {
      var text = one[1].replace("{ref}", reference).replace("{enroot}", reference.replace("@", ":"));
      var platform = wanted[last] >= 0 && one[0] === "Docker" ? " --platform " + data.facets[last][2][wanted[last]] : "";
      return line(one[0], text.replace("docker pull", "docker pull" + platform), !named || digest);
    }));
  }
  function show() {
    var wanted = chosen();
    limit(wanted);
    answer(wanted);
    return wanted;
  }

  // The choice is in the address, so that it can be sent to somebody.
  function remember(wanted) {
    var parts = [];
    wanted.forEach(function (value, i) {
      if (value >= 0) { parts.push(data.facets[i][0] + "=" + encodeURIComponent(data.facets[i][2][value])); }
    });
    try { history.replaceState(null, "", parts.length ? "#" + parts.join("&") : location.pathname + location.search); } catch (error) { /* a page in a frame */ }
  }
  function recall() {
    location.hash.slice(1).split("&").forEach(function (part) {
      var pair = part.split("="), i = data.facets.findIndex(function (facet) { return facet[0] === pair[0]; });
      var value = "";
      try { value = decodeURIComponent(pair[1] || ""); } catch (error) { return; }
      var at = i < 0 ? -1 : data.facets[i][2].indexOf(value);
      if (at >= 0 && any(withChoice(chosen(), i, at))) { sets[i].querySelector('input[value="' + at + '"]').checked = true; }
    });
  }
  form.addEventListener("change", function () { remember(show()); });
  form.addEventListener("reset", function () { setTimeout(function () { remember(show()); }, 0); });
  [["by-tag", false], ["by-digest", true]].forEach(function (pair) {
    node(pair[0]).addEventListener("click", function () {
      byDigest = pair[1];
      node("by-tag").setAttribute("aria-pressed", String(!byDigest));
      node("by-digest").setAttribute("aria-pressed", String(byDigest));
      answer(chosen());
    });
  });
  node("picker").hidden = false;
  recall();
  show();

  // The table: search and sort.
  document.addEventListener("DOMContentLoaded", function () {
    var table = document.querySelector("table.images"), body = table.tBodies[0], rows = Array.from(body.rows), texts;
    all = rows;
    answer(chosen());
    var heads = Array.from(table.tHead.rows[0].cells), found = node("found");
    document.querySelector(".search").hidden = false;

    function search() {
      texts = texts || rows.map(function (row) { return row.textContent.toLowerCase() + " sha256:" + row.dataset.digest; });
      var asked = node("search").value.toLowerCase().split(/\s+/).filter(Boolean), count = 0;
      rows.forEach(function (row, i) {
        var hit = asked.every(function (word) { return texts[i].indexOf(word) >= 0; });
        row.hidden = !hit;
        count += hit;
      });
      found.textContent = count + " of " + rows.length + (count ? "" : ": nothing fits");
    }
    node("search").addEventListener("input", search);
    found.textContent = rows.length + " of " + rows.length;

    var units = { B: 1, MB: 1e6, GB: 1e9 };
    function key(cell) {
      var text = cell.textContent.trim(), size = /^([\d.]+) (MB|GB)$/.exec(text);
      return size ? size[1] * units[size[2]] : text;
    }
    var collator = new Intl.Collator("en", { numeric: true });
    heads.forEach(function (head, i) {
      var button = document.createElement("button");
      button.type = "button";
      button.append.apply(button, Array.from(head.childNodes));
      head.append(button);
      button.addEventListener("click", function () {
        var up = head.getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1;
        heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        var keys = new Map(Array.from(body.rows, function (row) { return [row, key(row.cells[i])]; }));
        var sorted = Array.from(body.rows).sort(function (a, b) {
          var one = keys.get(a), other = keys.get(b);
          return sign * (typeof one === "number" && typeof other === "number" ? one - other : collator.compare(one, other));
        });
        body.append.apply(body, sorted);
      });
    });
  });
})();
