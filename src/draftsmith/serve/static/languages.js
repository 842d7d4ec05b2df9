// Names as prompts use them, and the codes by which browsers choose fonts and break lines.

export const LANGUAGES = {
  Arabic: "ar",
  Bulgarian: "bg",
  Chinese: "zh",
  Czech: "cs",
  Danish: "da",
  Dutch: "nl",
  English: "en",
  Finnish: "fi",
  French: "fr",
  German: "de",
  Greek: "el",
  Hebrew: "he",
  Hindi: "hi",
  Hungarian: "hu",
  Indonesian: "id",
  Italian: "it",
  Japanese: "ja",
  Korean: "ko",
  Norwegian: "no",
  Persian: "fa",
  Polish: "pl",
  Portuguese: "pt",
  Romanian: "ro",
  Russian: "ru",
  Spanish: "es",
  Swedish: "sv",
  Thai: "th",
  Turkish: "tr",
  Ukrainian: "uk",
  Vietnamese: "vi",
};

/** The code of a language; empty when it is not known. */
export function codeOf(name) {
  return Object.hasOwn(LANGUAGES, name ?? "") ? LANGUAGES[name] : "";
}
