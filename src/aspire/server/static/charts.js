// Small charts as SVG, each with a sentence that says what it shows.
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 480;
const HEIGHT = 96;

function draw(svg, shapes, sentence) {
  svg.replaceChildren(...shapes);
  svg.setAttribute("aria-label", sentence);
  svg.nextElementSibling.textContent = sentence;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}

// values: numbers or null where nothing was measured, oldest first; capacity: points across the whole width.
export function line(svg, values, capacity, top, format) {
  const known = values.filter((value) => value !== null);
  const limit = top ?? Math.max(1, ...known);
  const shapes = [];
  let points = [];
  const flush = () => {
    if (points.length > 0) shapes.push(shape("polyline", { points: points.join(" ") }));
    points = [];
  };
  values.forEach((value, i) => {
    if (value === null) return flush();
    const x = WIDTH * (1 - (values.length - 1 - i) / (capacity - 1));
    points.push(`${x.toFixed(1)},${(HEIGHT - 4 - (HEIGHT - 8) * Math.min(1, value / limit)).toFixed(1)}`);
  });
  flush();
  draw(svg, shapes, known.length === 0 ? "nothing measured yet"
    : `now ${format(known.at(-1))}, least ${format(Math.min(...known))}, most ${format(Math.max(...known))}`);
}

// counts[k]: how many verifications had k drafts.
export function bars(svg, counts) {
  const most = Math.max(1, ...counts);
  const width = WIDTH / Math.max(17, counts.length);
  const shapes = counts.map((count, k) => {
    const height = (HEIGHT - 4) * count / most;
    return shape("rect", { x: k * width + 1, y: HEIGHT - height, width: Math.max(1, width - 2), height });
  });
  const total = counts.reduce((sum, count) => sum + count, 0);
  const mean = counts.reduce((sum, count, k) => sum + count * k, 0) / Math.max(1, total);
  draw(svg, shapes, total === 0 ? "no verifications yet" : `${total} verifications, mean draft length ${mean.toFixed(1)}`);
}
