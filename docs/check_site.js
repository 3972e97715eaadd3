// What check_site.py asks of each page, in the page.
() => {
  const channels = text => (text.match(/[\d.]+/g) || []).map(Number);
  const blend = (over, under) => {
    const alpha = over.length > 3 ? over[3] : 1;
    return [0, 1, 2].map(i => over[i] * alpha + under[i] * (1 - alpha));
  };
  const ground = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      layers.push(colour);
      if (colour.length === 3) break;
    }
    return layers.reverse().reduce((under, over) => blend(over, under), [255, 255, 255]);
  };
  const luminance = colour => {
    const [r, g, b] = colour.map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = element => {
    const under = ground(element);
    const sides = [under, blend(channels(getComputedStyle(element).color), under)].map(luminance).sort((a, b) => b - a);
    return (sides[0] + 0.05) / (sides[1] + 0.05);
  };
  const own = element => [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const seen = element => element.checkVisibility({opacityProperty: true, visibilityProperty: true});
  const short = element => `<${element.tagName.toLowerCase()} ${element.className}> ${element.textContent.trim().slice(0, 50)}`;
  const inside = [...document.querySelectorAll("article *")].filter(seen);

  const texts = {};
  for (const element of inside.filter(own)) {
    if (element.matches(".headerlink")) continue;
    const style = getComputedStyle(element);
    const kind = `${element.tagName} ${element.className} ${style.color} ${ground(element)}`;
    texts[kind] ??= {contrast: contrast(element), large: parseFloat(style.fontSize) >= 24, what: short(element)};
  }
  const scrolls = element => {
    for (let at = element; at && at.tagName !== "ARTICLE"; at = at.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(at).overflowX)) return true;
    return false;
  };
  const edge = document.documentElement.clientWidth + 1;
  return {
    scheme: document.body.dataset.mdColorScheme,
    links: [...document.querySelectorAll("a[href]")].map(link => link.href),
    ids: [...document.querySelectorAll("[id]")].map(element => element.id),
    missingPictures: [...document.images].filter(image => !(image.complete && image.naturalWidth)).map(image => image.src),
    texts: Object.values(texts),
    cut: inside.filter(element => element.getBoundingClientRect().right > edge && !scrolls(element)).map(short),
  };
}
