// The picker, which reads everything from the table of images; the table itself; and copying of commands.
(function () {
  "use strict";
  const node = id => document.getElementById(id), form = document.querySelector("form.facets");
  const table = document.querySelector("table.images"), rows = Array.from(table.tBodies[0].rows);
  const commands = JSON.parse(node("data").textContent), collator = new Intl.Collator("en", { numeric: true });
  const cell = (row, title) => row.querySelector(`[data-title="${title}"]`), nameOf = row => row.querySelector("a").hash.slice(1);
  const FACTS = ["Checks", "Scan", "Signature", "CUDA", "Platforms", "Compressed", "Dated"]; // columns that the answer shows
  let byDigest = false;

  const addAges = times => times.forEach(time => time.append(age(time.dateTime)));
  addAges(document.querySelectorAll("time"));
  function age(time) {
    const days = Math.floor(Date.now() / 864e5) - Math.floor(Date.parse(time) / 864e5);
    if (!(days >= 0 && days < 1e4)) { return ""; }
    return days < 1 ? ", today" : days < 2 ? ", yesterday" : days < 60 ? `, ${days} days ago` : `, ${Math.round(days / 30.44)} months ago`;
  }

  // Facets are the columns with a key. A row has a list of values for each, because an image can be for several platforms.
  const columns = Array.from(table.tHead.rows[0].cells, (head, column) => ({ key: head.dataset.key, title: head.dataset.facet, column }));
  const facets = columns.filter(facet => facet.key);
  const choices = new Map(rows.map(row => [row, facets.map(facet => valuesOf(row.cells[facet.column], facet.key))]));
  function valuesOf(cell, key) {
    const text = cell.textContent.trim();
    if (key === "image") { return [text.split(/\s/)[0]]; }
    if (key === "platform") { return text.split(", ").map(name => "linux/" + name); }
    return [key === "cuda" ? text.split(".").slice(0, 2).join(".") : text]; // people choose by 13.2, not by 13.2.1
  }
  // Images keep the order of the matrix. Other values descend, so that the newest is first; variants and platforms ascend. `none` is last.
  facets.forEach((facet, i) => {
    const sign = facet.key === "variant" || facet.key === "platform" ? 1 : -1;
    facet.values = Array.from(new Set(rows.flatMap(row => choices.get(row)[i])));
    if (facet.key !== "image") { facet.values.sort((a, b) => (a === "none") - (b === "none") || sign * collator.compare(a, b)); }
    const box = document.createElement("div"), label = document.createElement("label"), select = document.createElement("select");
    label.append(facet.title);
    label.htmlFor = select.id = "choice-" + facet.key;
    select.append(new Option("any", ""), ...facet.values.map(value => new Option(value, value)));
    box.append(label, " ", select);
    form.querySelector("button").before(box);
    facet.select = select;
  });
  const day = row => cell(row, "Dated").querySelector("time").dateTime.slice(0, 10);
  const cuda = row => cell(row, "CUDA") ? cell(row, "CUDA").textContent : "";
  const newest = rows.slice().sort((a, b) => collator.compare(day(b), day(a)) || collator.compare(cuda(b), cuda(a)));

  const chosen = () => facets.map(facet => facet.select.value);
  const withChoice = (wanted, i, value) => Object.assign(wanted.slice(), { [i]: value });
  const fits = (row, wanted) => wanted.every((value, i) => !value || choices.get(row)[i].includes(value));
  const any = wanted => rows.some(row => fits(row, wanted));

  // Returns the choice that excludes a value: one that never occurs together with it, otherwise all choices.
  function exclusion(wanted, i, value) {
    const nothing = facets.map(() => ""), others = facets.map((_, j) => j).filter(j => j !== i && wanted[j]);
    const alone = others.find(j => !any(withChoice(withChoice(nothing, i, value), j, wanted[j])));
    return (alone === undefined ? others : [alone]).map(j => facets[j].title + " " + wanted[j]).join(" and ");
  }
  function limit(wanted) {
    facets.forEach((facet, i) => facet.values.forEach((value, at) => {
      const option = facet.select.options[at + 1];
      option.disabled = !any(withChoice(wanted, i, value));
      option.textContent = option.disabled ? `${value} – not with ${exclusion(wanted, i, value)}` : value;
    }));
  }

  // Fills a list with the commands for an image.
  function showCommands(list, row, reference, platform) {
    list.replaceChildren(...Object.entries(commands[row.dataset.repository]).map(([title, command]) => {
      const line = node("command").content.firstElementChild.cloneNode(true);
      line.querySelector("b").textContent = title;
      line.querySelector(".away").textContent = " the command for " + title;
      line.querySelector("code").textContent = command.replace("{ref}", reference)
        .replace("{enroot}", reference.replace("@", ":")).replace("docker pull", "docker pull" + platform);
      return line;
    }));
  }
  function tile(title, row) {
    const pair = document.createElement("div"), name = document.createElement("dt"), value = document.createElement("dd");
    name.textContent = title;
    value.append(...cell(row, title).cloneNode(true).childNodes);
    pair.append(name, value);
    return pair;
  }
  function answer(wanted) {
    const found = newest.filter(row => fits(row, wanted)), sound = found.filter(row => !row.querySelector(".failed"));
    const best = sound[0] || found[0], over = found[0], name = nameOf(best), platform = wanted[facets.length - 1];
    const reference = byDigest ? "@sha256:" + best.dataset.digest : name.slice(name.indexOf(":"));
    node("fits").textContent = !sound.length ? "All that fit have failures; this is the newest."
      : sound.length === 1 ? "This one fits." : `The newest of ${sound.length} that fit.`;
    node("tag").textContent = name.split(":")[0] + reference;
    node("page").href = "#" + name;
    node("facts").replaceChildren(...FACTS.filter(title => cell(best, title)).map(title => tile(title, best)));
    node("over").hidden = over === best;
    const link = over.querySelector("a").cloneNode();
    link.textContent = nameOf(over);
    node("over").replaceChildren("Not offered, as it has failures: ", link, `, dated ${day(over)}.`);
    showCommands(node("commands"), best, reference, platform && " --platform " + platform);
  }
  function show(unmet) {
    limit(chosen());
    answer(chosen());
    node("unmet").hidden = !unmet;
    node("unmet").textContent = unmet;
  }

  // The address contains the choice, so that people can share it. The page names the parts that no image has.
  function remember() {
    const parts = facets.filter(facet => facet.select.value).map(facet => facet.key + "=" + encodeURIComponent(facet.select.value));
    try { history.replaceState(null, "", location.pathname + (parts.length ? "#" + parts.join("&") : "")); } catch (error) { /* a page in a frame */ }
    show("");
  }
  function decoded(text) { try { return decodeURIComponent(text); } catch (error) { return text; } }
  function recall() {
    const unmet = [];
    facets.forEach(facet => { facet.select.value = ""; });
    (location.search.slice(1) + "&" + location.hash.slice(1)).split("&").forEach(part => {
      const key = part.split("=")[0], asked = decoded(part.slice(key.length + 1));
      const i = facets.findIndex(facet => facet.key === key), facet = facets[i];
      if (key === part || !asked) { return; }
      if (!facet) { unmet.push("images are not chosen by " + key); return; }
      const value = facet.values.find(known => known === asked) || facet.values.find(known => asked.startsWith(known + "."));
      if (!value) { unmet.push(`no image has ${facet.title} ${asked}`); return; }
      if (value !== asked) { unmet.push(`it asks for ${facet.title} ${asked}, and ${facet.title} ${value} is shown`); }
      if (any(withChoice(chosen(), i, value))) { facet.select.value = value; }
      else { unmet.push(`no image has ${facet.title} ${asked} and ${exclusion(chosen(), i, value)}`); }
    });
    show(unmet.length ? `This link cannot be met in full: ${unmet.join("; ")}.` : "");
  }
  form.addEventListener("change", remember);
  form.addEventListener("reset", () => setTimeout(remember, 0));
  ["by-tag", "by-digest"].forEach(id => node(id).addEventListener("click", () => {
    byDigest = id === "by-digest";
    node("by-tag").setAttribute("aria-pressed", String(!byDigest));
    node("by-digest").setAttribute("aria-pressed", String(byDigest));
    answer(chosen());
  }));
  node("picker").hidden = false;
  recall();

  // Copying. Without a secure context, the clipboard is missing, but a selection can be copied.
  function announce(button, text) {
    button.dataset.label = button.dataset.label || button.innerHTML;
    button.textContent = text;
    setTimeout(() => { button.innerHTML = button.dataset.label; }, 1500);
  }
  document.addEventListener("click", event => {
    const button = event.target.closest && event.target.closest("button.copy");
    if (!button) { return; }
    const code = button.parentNode.querySelector("code");
    function copySelection() {
      getSelection().selectAllChildren(code);
      announce(button, document.execCommand("copy") ? "Copied" : "Selected");
    }
    if (navigator.clipboard && window.isSecureContext) {
      navigator.clipboard.writeText(code.textContent).then(() => announce(button, "Copied"), copySelection);
    } else { copySelection(); }
  });

  // Search the table, sort it, and turn its pages.
  const size = 50, texts = new Map(rows.map(row => [row, `${row.textContent.toLowerCase()} sha256:${row.dataset.digest}`]));
  let first = 0;
  function turn(to) {
    const asked = node("search").value.toLowerCase().split(/\s+/);
    const hits = Array.from(table.tBodies[0].rows).filter(row => {
      row.hidden = !asked.every(word => texts.get(row).includes(word));
      return !row.hidden;
    });
    first = to;
    hits.forEach((row, i) => row.classList.toggle("elsewhere", i < first || i >= first + size));
    node("found").textContent = hits.length ? `${first + 1}–${Math.min(first + size, hits.length)} of ${hits.length}` : "nothing fits";
    node("before").disabled = !first;
    node("after").disabled = first + size >= hits.length;
    document.querySelector(".pager").hidden = hits.length <= size;
  }
  [["before", -size], ["after", size]].forEach(([id, step]) => node(id).addEventListener("click", () => {
    turn(first + step);
    node("images").scrollIntoView();
  }));
  node("search").addEventListener("input", () => turn(0));
  document.querySelector(".search").hidden = false;
  // Numbers without a unit are versions, which compare part by part: CUDA 12.9 comes before 12.10.
  const units = { MB: 1e6, GB: 1e9 };
  sortable(table, rows, text => {
    const size = /^([\d.]+) (MB|GB)$/.exec(text);
    return size ? size[1] * units[size[2]] : text;
  });
  table.tHead.addEventListener("click", () => turn(0));
  turn(0);

  // Show the image that the address names.
  function showImage() {
    const name = decoded(location.hash.slice(1)), list = document.querySelector("article.image:target .commands");
    if (name.includes(":") && !node(name)) { show(`There is no image ${name} here, or no longer.`); }
    if (list) { showCommands(list, rows[list.dataset.place], name.slice(name.indexOf(":")), ""); }
  }
  window.addEventListener("load", () => {
    addAges(document.querySelectorAll("article time"));
    showImage();
  });
  window.addEventListener("hashchange", () => {
    if (location.hash.includes("=")) { recall(); }
    showImage();
  });
})();
