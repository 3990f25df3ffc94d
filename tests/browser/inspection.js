// What tests compute in a page. Each function returns what it finds fault with, in words.

const all = selector => [...document.querySelectorAll(selector)];
const textOf = element => element.textContent.trim();
const short = element => element.outerHTML.slice(0, 120);

// Any CSS color as [red, green, blue, alpha]: 0 to 255, alpha to 1.
const paint = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
const colors = new Map();
function rgba(color) {
  if (!colors.has(color)) {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = color;
    paint.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = paint.getImageData(0, 0, 1, 1).data;
    colors.set(color, [red, green, blue, alpha / 255]);
  }
  return colors.get(color);
}

function over(top, below, alpha) {
  return below.map((channel, i) => top[i] * alpha + channel * (1 - alpha));
}

// What is painted behind an element: the backgrounds of all it is in, over the browser's own.
function ground(element) {
  const dark = getComputedStyle(document.documentElement).colorScheme === 'dark';
  const boxes = [];
  for (let box = element; box; box = box.parentElement) boxes.unshift(box);
  let color = dark ? [18, 18, 18] : [255, 255, 255];
  let opacity = 1;
  for (const box of boxes) {
    const style = getComputedStyle(box);
    opacity *= Number(style.opacity);
    if (box.ownerSVGElement) continue;
    const layer = rgba(style.backgroundColor);
    color = over(layer, color, layer[3] * opacity);
  }
  return { color, opacity };
}

function brightness() {
  const [red, green, blue] = ground(document.body).color;
  return 0.3 * red + 0.6 * green + 0.1 * blue;
}

// WCAG 2's relative luminance.
function luminance(color) {
  const [red, green, blue] = color
    .map(channel => channel / 255)
    .map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(element) {
  const style = getComputedStyle(element);
  const below = ground(element);
  const ink = rgba(element.ownerSVGElement ? style.fill : style.color);
  const [low, high] = [over(ink, below.color, ink[3] * below.opacity), below.color]
    .map(luminance)
    .sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function faintText(least) {
  const found = new Set();
  const range = document.createRange();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const unseen = 'script, style, template, noscript, title, desc, option, :disabled';
  let seen = 0;
  for (let node; (node = walker.nextNode()); ) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest(unseen)) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    range.selectNodeContents(node);
    const { width, height } = range.getBoundingClientRect();
    if (width < 2 || height < 2) continue;
    seen += 1;
    const ratio = contrast(element);
    if (ratio < least) {
      const name = `${element.tagName.toLowerCase()}.${element.getAttribute('class')}`;
      found.add(`${ratio.toFixed(2)}: ${name} "${node.data.trim().slice(0, 40)}"`);
    }
  }
  return seen ? [...found] : ['there is no text'];
}

// The name that a screen reader says.
function nameOf(element) {
  const byId = (element.getAttribute('aria-labelledby') ?? '').split(' ').filter(Boolean);
  return (
    [...(element.labels ?? [])].map(textOf).join(' ') ||
    element.getAttribute('aria-label') ||
    byId.map(id => document.getElementById(id)?.textContent ?? '').join(' ').trim()
  );
}

function structure() {
  const found = [];
  const say = (what, elements) => elements.forEach(e => found.push(`${what}: ${short(e)}`));
  const without = (selector, test) => all(selector).filter(element => !test(element));

  if (all('h1').length !== 1 || !textOf(all('h1')[0])) found.push(`${all('h1').length} h1`);
  if (all('main').length !== 1) found.push(`${all('main').length} main`);
  if (!document.documentElement.lang) found.push('no language');
  if (!document.title.trim()) found.push('no title');
  let level = 1;
  for (const heading of all('main :is(h1, h2, h3, h4, h5, h6)')) {
    const its = Number(heading.tagName[1]);
    if (its > level + 1) say('heading skips a level', [heading]);
    level = its;
  }

  say('table without a caption', without('table', table => table.caption && textOf(table.caption)));
  say('table without headers', without('table', table => table.querySelector('th')));
  say('header without a scope', without('th', th => th.scope));
  const columns = row => [...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0);
  for (const table of all('table:has(thead)')) {
    const head = columns(table.tHead.rows[0]);
    const rows = [...table.tBodies].flatMap(body => [...body.rows]);
    say(`row without ${head} cells`, rows.filter(row => columns(row) !== head));
  }

  say('field without a label', without('input:not([type=hidden]), select, textarea', nameOf));
  say('nothing to read', without('a, button', element => textOf(element) || nameOf(element)));
  say('picture without a name', without('svg[role=img]', e => nameOf(e) || e.querySelector('title')));
  say('picture without a text', all('img:not([alt])'));
  say('style or script in the page', all('[style], script:not([src])'));

  const ids = all('[id]').map(element => element.id);
  ids.filter((id, i) => ids.indexOf(id) !== i).forEach(id => found.push(`id twice: ${id}`));
  for (const attribute of ['aria-labelledby', 'aria-describedby', 'aria-controls', 'for']) {
    const leads = e => e.getAttribute(attribute).split(' ').every(id => document.getElementById(id));
    say(`${attribute} leads nowhere`, without(`[${attribute}]`, leads));
  }
  return found;
}

// What sticks out of the window, unless a box around it scrolls.
function tooWide() {
  const width = document.documentElement.clientWidth;
  const full = document.documentElement.scrollWidth;
  if (full <= width) return [];
  const held = element =>
    element &&
    element !== document.body &&
    (getComputedStyle(element).overflowX !== 'visible' || held(element.parentElement));
  const right = element => Math.round(element.getBoundingClientRect().right);
  const out = all('body *').filter(e => right(e) > width && !held(e.parentElement));
  return [`${full} of ${width} pixels`, ...out.slice(0, 5).map(e => `${right(e)}: ${short(e)}`)];
}

// Numbers what Tab has to reach, and returns how many there are.
function markStops() {
  const stops = all('a[href], button, input:not([type=hidden]), select, textarea, summary').filter(
    e => !e.disabled && e.checkVisibility({ visibilityProperty: true }),
  );
  stops.forEach((element, number) => (element.dataset.stop = number));
  return stops.length;
}

function focused() {
  const element = document.activeElement;
  if (!element || element === document.body) return null;
  const box = element.getBoundingClientRect();
  const { outlineStyle, outlineWidth, boxShadow } = getComputedStyle(element);
  return {
    stop: element.dataset.stop === undefined ? null : Number(element.dataset.stop),
    html: short(element),
    ring: (outlineStyle !== 'none' && parseFloat(outlineWidth) >= 1) || boxShadow !== 'none',
    inSight:
      box.width > 0 && box.height > 0 && box.right > 0 && box.left < innerWidth &&
      box.bottom > 0 && box.top < innerHeight,
  };
}

// Elements that a page of ours never has: a key was taken for markup.
function intruders() {
  return all('img, iframe, object, script:not([src]), [onfocus], [onmouseover], [onerror]').map(short);
}
