// A curve over the last minutes, as SVG: no canvas, so that it follows the colours of the page and its zoom.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 48;

/** A chart inside `parent`. Its draw(points, end_s) shows [{at_s, value}] of the `length_s` seconds before end_s, and returns the highest. */
export class Chart {
  constructor(parent, label, length_s) {
    this.label = label;
    this.length_s = length_s;
    this.svg = append(parent, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.area = append(this.svg, "polygon", { class: "area" });
    this.curve = append(this.svg, "polyline", { class: "curve" });
  }

  draw(points, end_s, format) {
    const highest = Math.max(0, ...points.map(({ value }) => value));
    const scale = (HEIGHT - 2) / (highest || 1);
    const x = (at_s) => (WIDTH * (1 - (end_s - at_s) / this.length_s)).toFixed(1);
    const places = points.map(({ at_s, value }) => `${x(at_s)},${(HEIGHT - 1 - scale * value).toFixed(1)}`);
    this.curve.setAttribute("points", places.join(" "));
    const ends = points.length ? [`${x(points[0].at_s)},${HEIGHT}`, ...places, `${x(points.at(-1).at_s)},${HEIGHT}`] : [];
    this.area.setAttribute("points", ends.join(" "));
    const minutes = Math.round(this.length_s / 60);
    this.svg.setAttribute("aria-label", `${this.label}, last ${minutes} minutes, at most ${format(highest)}`);
    return highest;
  }
}

function append(parent, kind, attributes) {
  const node = document.createElementNS(NAMESPACE, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent.append(node);
  return node;
}
