function bytes(element) {  // of base 85: five characters have four bytes
  const text = element.textContent, values = new Uint8Array(128);
  [...element.dataset.alphabet].forEach((character, value) => values[character.charCodeAt(0)] = value);
  const view = new DataView(new ArrayBuffer(text.length / 5 * 4));
  for (let i = 0; i < text.length; i += 5) {
    let value = 0;
    for (let j = i; j < i + 5; j++) value = value * 85 + values[text.charCodeAt(j)];
    view.setUint32(i / 5 * 4, value);
  }
  return new Uint8Array(view.buffer, 0, element.dataset.size);
}
async function draw() {
  const packed = bytes(document.getElementById("plotly"));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(unpacked).text();
  document.head.append(library);
  document.querySelectorAll(".figure").forEach(figure => {
    const {data, layout} = JSON.parse(figure.nextElementSibling.textContent);
    Plotly.newPlot(figure, data, layout, {responsive: true, displayModeBar: false});
    figure.closest("details")?.addEventListener("toggle", () => Plotly.Plots.resize(figure));
  });
}
document.querySelectorAll("select.chooser").forEach(select => {
  const choose = () => [...select.closest("section").querySelector(".chosen").children].forEach(
    (part, i) => part.hidden = i !== select.selectedIndex);
  select.addEventListener("input", choose);
  choose();  // a page that is loaded again keeps the choice
});
draw().catch(error => document.querySelectorAll(".figure").forEach(
  figure => figure.textContent = `The figures need a browser of 2023 or later (${error}).`));
