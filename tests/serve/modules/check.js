// Runs the tests of one file, in node or in a browser.

export function equal(found, wanted) {
  const [left, right] = [found, wanted].map((value) => JSON.stringify(value));
  if (left !== right) throw new Error(`${left} is not ${right}`);
}

export async function run(tests) {
  const failures = [];
  for (const [name, test] of Object.entries(tests)) {
    try {
      await test();
    } catch (error) {
      failures.push(`${name}: ${error.message}`);
    }
  }
  return { count: Object.keys(tests).length, failures };
}
