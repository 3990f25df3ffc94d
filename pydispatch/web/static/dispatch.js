// Live refresh. Asks for the page that is open, and puts its main part in place of the one shown.
// The next request starts when the last one has ended, never beside it; none while the tab is
// hidden. What the reader did to the page stays: scrolled, focused, opened, chosen.
'use strict';

(() => {
  const CHOICES = ['0', '2', '5', '10'];
  const KEY = 'dispatch-refresh';
  const PATIENCE = 15000;

  const main = document.getElementById('main');
  const box = document.getElementById('live-box');
  const select = document.getElementById('live');
  const status = document.getElementById('live-status');
  if (!main || !box || !select || !status || !main.hasAttribute('data-live')) return;

  let timer = 0;
  let asking = false;
  let lostSince = null;
  let last = '';

  const remembered = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  };

  const remember = value => {
    try {
      localStorage.setItem(KEY, value);
    } catch {
      // Where nothing may be kept, it holds for this page.
    }
  };

  const say = (text, lost = false) => {
    if (status.textContent !== text) status.textContent = text;
    status.classList.toggle('lost', lost);
  };

  const clock = moment => moment.toTimeString().slice(0, 8);

  // Elements of the old and the new page that are the same thing: by id, else by what they are.
  const nameOf = element => {
    if (element.id) return `#${element.id}`;
    const parts = ['href', 'name', 'value', 'aria-label', 'data-action'];
    return [element.tagName, ...parts.map(part => element.getAttribute(part) ?? '')].join('\n');
  };

  const find = (root, selector, name, place) => {
    const alike = [...root.querySelectorAll(selector)].filter(each => nameOf(each) === name);
    return alike[place] ?? alike[0];
  };

  const placeOf = (root, selector, element) =>
    [...root.querySelectorAll(selector)].filter(each => nameOf(each) === nameOf(element)).indexOf(element);

  const FOCUSABLE = 'a[href], button, input, select, textarea, summary, [tabindex]';

  const isTyped = field =>
    field.type === 'checkbox' || field.type === 'radio'
      ? field.checked !== field.defaultChecked
      : field.tagName === 'SELECT'
        ? [...field.options].some(option => option.selected !== option.defaultSelected)
        : field.value !== field.defaultValue;

  const busy = () => {
    const selection = getSelection();
    return !!selection && !selection.isCollapsed && main.contains(selection.anchorNode);
  };

  const replace = fresh => {
    const focused = main.contains(document.activeElement) && document.activeElement !== main
      ? document.activeElement : null;
    const ofFocus = focused && {
      name: nameOf(focused),
      place: placeOf(main, FOCUSABLE, focused),
      range: typeof focused.selectionStart === 'number'
        ? [focused.selectionStart, focused.selectionEnd] : null,
    };
    // A list that is open would close under the hand that chooses from it.
    if (focused?.tagName === 'SELECT') return;
    const opened = new Map([...main.querySelectorAll('details[id]')].map(each => [each.id, each.open]));
    const fields = [...main.querySelectorAll('input, select, textarea')]
      .filter(each => each.type !== 'hidden' && isTyped(each))
      .map(each => ({ name: nameOf(each), checked: each.checked, value: each.value }));
    const scrolls = [...main.querySelectorAll('.scroll, pre')]
      .map((each, place) => [place, each.scrollLeft, each.scrollTop])
      .filter(([, left, top]) => left || top);
    const [left, top] = [scrollX, scrollY];

    main.replaceChildren(...fresh.childNodes);

    for (const [id, open] of opened) {
      const details = document.getElementById(id);
      if (details) details.open = open;
    }
    for (const kept of fields) {
      const field = find(main, 'input, select, textarea', kept.name, 0);
      if (field) {
        if (field.type === 'checkbox' || field.type === 'radio') field.checked = kept.checked;
        else field.value = kept.value;
      }
    }
    const scrollers = main.querySelectorAll('.scroll, pre');
    for (const [place, x, y] of scrolls) scrollers[place]?.scrollTo(x, y);
    if (ofFocus) {
      const again = find(main, FOCUSABLE, ofFocus.name, ofFocus.place);
      if (again) {
        again.focus({ preventScroll: true });
        try {
          if (ofFocus.range) again.setSelectionRange(...ofFocus.range);
        } catch {
          // Numbers have no selection.
        }
      } else {
        main.focus({ preventScroll: true });
      }
    }
    if (scrollX !== left || scrollY !== top) scrollTo({ left, top, behavior: 'instant' });
  };

  const lost = why => {
    lostSince ??= new Date();
    say(`${why} since ${clock(lostSince)}, still trying`, true);
  };

  const setAsking = value => {
    asking = value;
    status.setAttribute('aria-busy', String(value));
  };

  const ask = async () => {
    setAsking(true);
    const control = new AbortController();
    const patience = setTimeout(() => control.abort(), PATIENCE);
    try {
      const response = await fetch(location.href, {
        headers: { accept: 'text/html' },
        credentials: 'same-origin',
        cache: 'no-store',
        signal: control.signal,
      });
      const text = await response.text();
      const fresh = new DOMParser().parseFromString(text, 'text/html').getElementById('main');
      if (!fresh || response.redirected) {
        lost('No dashboard in what the server answers');
      } else if (!response.ok && !document.getElementById('problem')) {
        lost(response.status === 503 ? 'The database cannot be reached' : `The server answers ${response.status}`);
      } else {
        lostSince = null;
        if (!busy() && fresh.innerHTML !== last) {
          last = fresh.innerHTML;
          if (response.ok) document.title = new DOMParser().parseFromString(text, 'text/html').title;
          replace(fresh);
        }
        say('');
      }
    } catch {
      lost('The server cannot be reached');
    } finally {
      clearTimeout(patience);
      setAsking(false);
      plan();
    }
  };

  const plan = () => {
    clearTimeout(timer);
    const seconds = Number(select.value);
    if (!seconds || document.hidden || asking) return;
    timer = setTimeout(ask, seconds * 1000);
  };

  select.addEventListener('change', () => {
    remember(select.value);
    if (select.value === '0') {
      lostSince = null;
      say('');
    }
    plan();
  });

  document.addEventListener('visibilitychange', () => {
    clearTimeout(timer);
    if (!document.hidden && Number(select.value) && !asking) ask();
  });

  // Another tab chose otherwise.
  addEventListener('storage', event => {
    if (event.key === KEY && CHOICES.includes(event.newValue)) {
      select.value = event.newValue;
      plan();
    }
  });

  const chosen = remembered();
  select.value = CHOICES.includes(chosen) ? chosen : '5';
  box.hidden = false;
  plan();
})();
