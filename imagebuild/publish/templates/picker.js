// The picker works as soon as this has run, even while the table below is still loading.
(function () {
  "use strict";
  var node = function (id) { return document.getElementById(id); };
  var data = JSON.parse(node("data").textContent), form = document.querySelector("form.facets");
  var selects = Array.from(form.querySelectorAll("select")), last = data.facets.length - 1, byDigest = false, rows;

  function chosen() { return selects.map(function (select) { return Number(select.value); }); }
  function fits(row, wanted) {
    return wanted.every(function (value, i) {
      return value < 0 || (i === last ? (row[i + 1] >> value) & 1 : row[i + 1] === value);
    });
  }
  function any(wanted) { return data.rows.some(function (row) { return fits(row, wanted); }); }
  function withChoice(wanted, i, value) { var copy = wanted.slice(); copy[i] = value; return copy; }
  function nameOf(i, value) { return data.facets[i][1] + " " + data.facets[i][2][value]; }

  // Names the choice that excludes a value: one that the value never goes with, else all choices together.
  function exclusion(wanted, i, value) {
    var nothing = wanted.map(function () { return -1; }), names = [];
    for (var j = 0; j < wanted.length; j++) {
      if (j === i || wanted[j] < 0) { continue; }
      if (!any(withChoice(withChoice(nothing, i, value), j, wanted[j]))) { return nameOf(j, wanted[j]); }
      names.push(nameOf(j, wanted[j]));
    }
    return names.join(" and ");
  }
  function limit(wanted) {
    selects.forEach(function (select, i) {
      data.facets[i][2].forEach(function (text, value) {
        var option = select.options[value + 1];
        option.disabled = !any(withChoice(wanted, i, value));
        option.textContent = option.disabled ? text + " – not with " + exclusion(wanted, i, value) : text;
      });
    });
  }

  function age(time) {
    var days = Math.floor(Date.now() / 864e5) - Math.floor(Date.parse(time) / 864e5);
    if (!(days >= 0 && days < 1e4)) { return ""; }
    return days < 1 ? ", today" : days < 2 ? ", yesterday" : days < 60 ? ", " + days + " days ago" : ", " + Math.round(days / 30.44) + " months ago";
  }
  function tile(fact, i) {
    var pair = document.createElement("div"), title = document.createElement("dt"), value = document.createElement("dd"), text = document.createElement("span");
    title.textContent = data.titles[i];
    text.textContent = (fact[0] && data.marks[fact[0]] + " ") + fact[1] + (i === data.titles.length - 1 ? age(fact[1]) : "");
    text.className = fact[0] && "badge " + fact[0];
    value.append(text);
    pair.append(title, value);
    return pair;
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
  function isSound(row) { return !data.facts[row[0]].some(function (fact) { return fact[0] === "failed"; }); }
  function answer(wanted) {
    var found = data.rows.filter(function (row) { return fits(row, wanted); }), sound = found.filter(isSound);
    var best = sound[0] || found[0], place = best[0], tag = data.tags[place], image = data.facets[0][2][best[1]];
    var row = (rows || document.querySelectorAll("tr[data-digest]"))[place], digest = row && row.dataset.digest;
    var reference = byDigest ? "@sha256:" + (digest || "…") : ":" + tag, over = found[0];
    node("fits").textContent = !sound.length ? "All that fit have failures; this is the newest."
      : sound.length === 1 ? "This one fits." : "The newest of " + sound.length + " that fit.";
    node("tag").textContent = image + reference;
    node("page").href = "#" + image + ":" + tag;
    node("facts").replaceChildren.apply(node("facts"), data.facts[place].map(tile));
    node("over").hidden = over === best;
    if (over !== best) {
      var name = data.facets[0][2][over[1]] + ":" + data.tags[over[0]], link = document.createElement("a");
      link.href = "#" + name;
      link.textContent = name;
      node("over").replaceChildren("Not offered, as it has failures: ", link, ", dated " + data.facts[over[0]].slice(-1)[0][1] + ".");
    }
    showCommands(node("commands"), place, digest, reference, wanted[last] >= 0 ? " --platform " + data.facets[last][2][wanted[last]] : "");
  }
  function show(unmet) {
    var wanted = chosen();
    limit(wanted);
    answer(wanted);
    node("unmet").hidden = !unmet;
    node("unmet").textContent = unmet;
    return wanted;
  }

  // The choice is in the address, so that it can be sent to somebody. Parts that cannot be met are named.
  function remember(wanted) {
    var parts = [];
    wanted.forEach(function (value, i) {
      if (value >= 0) { parts.push(data.facets[i][0] + "=" + encodeURIComponent(data.facets[i][2][value])); }
    });
    try { history.replaceState(null, "", location.pathname + (parts.length ? "#" + parts.join("&") : "")); } catch (error) { /* a page in a frame */ }
  }
  function decoded(text) { try { return decodeURIComponent(text); } catch (error) { return text; } }
  function recall() {
    var unmet = [];
    selects.forEach(function (select) { select.value = -1; });
    (location.search.slice(1) + "&" + location.hash.slice(1)).split("&").forEach(function (part) {
      var key = part.split("=")[0], value = decoded(part.slice(key.length + 1)), i = data.facets.findIndex(function (facet) { return facet[0] === key; });
      if (key === part || !value) { return; }
      if (i < 0) { unmet.push("images are not chosen by " + key); return; }
      var values = data.facets[i][2], at = values.indexOf(value), asked = data.facets[i][1] + " " + value;
      if (at < 0) {
        at = values.findIndex(function (known) { return value.indexOf(known + ".") === 0; });
        unmet.push(at < 0 ? "no image has " + asked : "it asks for " + asked + ", and " + nameOf(i, at) + " is shown");
      }
      if (at < 0) { return; }
      if (any(withChoice(chosen(), i, at))) { selects[i].value = at; }
      else { unmet.push("no image has " + asked + " and " + exclusion(chosen(), i, at)); }
    });
    show(unmet.length ? "This link cannot be met in full: " + unmet.join("; ") + "." : "");
  }
  form.addEventListener("change", function () { remember(show("")); });
  form.addEventListener("reset", function () { setTimeout(function () { remember(show("")); }, 0); });
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

  // The table, once it is there: search, sort, and turn its pages. The image that the address names.
  document.addEventListener("DOMContentLoaded", function () {
    var table = document.querySelector("table.images"), size = 50, first = 0, texts;
    document.querySelectorAll("time").forEach(function (time) { time.append(age(time.dateTime)); });
    rows = Array.from(table.tBodies[0].rows);
    texts = new Map(rows.map(function (row) { return [row, row.textContent.toLowerCase() + " sha256:" + row.dataset.digest]; }));
    answer(chosen());
    document.querySelector(".search").hidden = false;

    function turn(to) {
      var asked = node("search").value.toLowerCase().split(/\s+/).filter(Boolean);
      var hits = Array.from(table.tBodies[0].rows).filter(function (row) {
        row.hidden = !asked.every(function (word) { return texts.get(row).indexOf(word) >= 0; });
        return !row.hidden;
      });
      first = to;
      hits.forEach(function (row, i) { row.classList.toggle("elsewhere", i < first || i >= first + size); });
      node("found").textContent = hits.length ? first + 1 + "–" + Math.min(first + size, hits.length) + " of " + hits.length : "nothing fits";
      node("before").disabled = !first;
      node("after").disabled = first + size >= hits.length;
      document.querySelector(".pager").hidden = hits.length <= size;
    }
    [["before", -size], ["after", size]].forEach(function (pair) {
      node(pair[0]).addEventListener("click", function () { turn(first + pair[1]); node("images").scrollIntoView(); });
    });
    node("search").addEventListener("input", function () { turn(0); });

    // Numbers without a unit are versions, which compare part by part: CUDA 12.9 comes before 12.10.
    var units = { MB: 1e6, GB: 1e9 };
    sortable(table, rows, function (text) {
      var size = /^([\d.]+) (MB|GB)$/.exec(text);
      return size ? size[1] * units[size[2]] : text;
    });
    table.tHead.addEventListener("click", function () { turn(0); });
    turn(0);

    function showImage() {
      var name = decoded(location.hash.slice(1)), list = document.querySelector("article.image:target .commands");
      if (name.indexOf(":") > 0 && !node(name)) { show("There is no image " + name + " here, or no longer."); }
      if (!list) { return; }
      var place = Number(list.dataset.place);
      showCommands(list, place, rows[place].dataset.digest, ":" + data.tags[place], "");
    }
    window.addEventListener("load", showImage);
    window.addEventListener("hashchange", function () {
      if (location.hash.indexOf("=") > 0) { recall(); }
      showImage();
    });
  });
})();
