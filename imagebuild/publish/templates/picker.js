// The picker works as soon as this has run, even while the table below is still loading.
(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("data").textContent);
  var form = document.querySelector("form.facets"), sets = Array.from(form.querySelectorAll("fieldset"));
  var last = data.facets.length - 1, byDigest = false, rows;
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
    var nothing = wanted.map(function () { return -1; }), names = [];
    for (var j = 0; j < wanted.length; j++) {
      if (j === i || wanted[j] < 0) { continue; }
      var name = data.facets[j][1] + " " + data.facets[j][2][wanted[j]];
      if (!any(withChoice(withChoice(nothing, i, value), j, wanted[j]))) { return name; }
      names.push(name);
    }
    return names.join(" and ");
  }
  function limit(wanted) {
    sets.forEach(function (set, i) {
      var reasons = {}, note = set.querySelector(".not");
      set.querySelectorAll("input").forEach(function (input) {
        var value = Number(input.value);
        input.disabled = value >= 0 && !any(withChoice(wanted, i, value));
        if (input.disabled) {
          var why = exclusion(wanted, i, value);
          (reasons[why] = reasons[why] || []).push(data.facets[i][2][value]);
        }
      });
      note.textContent = Object.keys(reasons).map(function (why) { return "Not with " + why + ": " + reasons[why].join(", "); }).join(". ");
      note.hidden = !note.textContent;
    });
  }

  // Fills a place with the commands for an image. The digests of tags are in the table, which may not be there yet.
  function showCommands(list, place, digest, reference, platform) {
    list.replaceChildren.apply(list, data.commands[data.repositories[place]].map(function (command) {
      var title = command[0], row = node("command").content.firstElementChild.cloneNode(true);
      row.querySelector("b").textContent = title;
      row.querySelector(".away").textContent = " the command for " + title;
      row.querySelector("button").disabled = !digest && reference.charAt(0) === "@";
      row.querySelector("code").textContent = command[1].replace("{ref}", reference)
        .replace("{enroot}", reference.replace("@", ":")).replace("docker pull", "docker pull" + platform);
      return row;
    }));
  }
  function answer(wanted) {
    var found = data.rows.filter(function (row) { return fits(row, wanted); });
    var place = found[0][0], tag = data.tags[place], row = (rows || document.querySelectorAll("tr[data-digest]"))[place];
    var digest = row && row.dataset.digest;
    var reference = byDigest || !tag ? "@sha256:" + (digest || "…") : ":" + tag;
    node("fits").textContent = found.length === 1 ? "This one fits." : "The newest of " + found.length + " that fit.";
    node("tag").textContent = data.facets[0][2][found[0][1]] + reference;
    node("page").href = row ? row.querySelector("a").getAttribute("href") : "#images";
    showCommands(node("commands"), place, digest, reference, wanted[last] >= 0 ? " --platform " + data.facets[last][2][wanted[last]] : "");
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

  // Copying. A page without a secure context has no clipboard, but can copy what is selected.
  function announce(button, text) {
    button.dataset.label = button.dataset.label || button.innerHTML;
    button.textContent = text;
    setTimeout(function () { button.innerHTML = button.dataset.label; }, 1500);
  }
  document.addEventListener("click", function (event) {
    var button = event.target.closest && event.target.closest("button.copy");
    if (!button) { return; }
    var code = button.parentNode.querySelector("code");
    function copySelection() {
      getSelection().selectAllChildren(code);
      announce(button, document.execCommand("copy") ? "Copied" : "Selected");
    }
    if (navigator.clipboard && window.isSecureContext) {
      navigator.clipboard.writeText(code.textContent).then(function () { announce(button, "Copied"); }, copySelection);
    } else { copySelection(); }
  });

  // The table, once it is there: search and sort. The commands of the image that the address names.
  document.addEventListener("DOMContentLoaded", function () {
    var table = document.querySelector("table.images"), texts;
    rows = Array.from(table.tBodies[0].rows);
    answer(chosen());
    document.querySelector(".search").hidden = false;

    function search() {
      texts = texts || rows.map(function (row) { return row.textContent.toLowerCase() + " sha256:" + row.dataset.digest; });
      var asked = node("search").value.toLowerCase().split(/\s+/).filter(Boolean), count = 0;
      rows.forEach(function (row, i) {
        row.hidden = !asked.every(function (word) { return texts[i].indexOf(word) >= 0; });
        count += !row.hidden;
      });
      node("found").textContent = count + " of " + rows.length + (count ? "" : ": nothing fits");
    }
    node("search").addEventListener("input", search);
    node("found").textContent = rows.length + " of " + rows.length;

    // Numbers without a unit are versions, which compare part by part: CUDA 12.9 comes before 12.10.
    var units = { MB: 1e6, GB: 1e9 };
    sortable(table, rows, function (text) {
      var size = /^([\d.]+) (MB|GB)$/.exec(text);
      return size ? size[1] * units[size[2]] : text;
    });

    function showImage() {
      var list = document.querySelector("article.image:target .commands");
      if (!list) { return; }
      var place = Number(list.dataset.place), digest = rows[place].dataset.digest;
      showCommands(list, place, digest, data.tags[place] ? ":" + data.tags[place] : "@sha256:" + digest, "");
    }
    ["load", "hashchange"].forEach(function (event) { window.addEventListener(event, showImage); });
  });
})();
