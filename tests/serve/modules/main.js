// node main.js ./FILE: prints what `run` found.

import { run } from "./check.js";

const { tests } = await import(process.argv[2]);
console.log(JSON.stringify(await run(tests)));
