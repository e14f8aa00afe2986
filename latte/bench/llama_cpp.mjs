// llama.cpp behind a pipe: reads one request a line, answers one line. Arguments: a GGUF file, tokens of context, threads.
import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const answer = (value) => process.stdout.write(JSON.stringify(value) + "\n");
const since = (start) => (performance.now() - start) / 1e3;

let sequence, context;
try {
    // From the working folder and NODE_PATH, as a script of the user's own would find it.
    const found = createRequire(process.cwd() + "/").resolve("node-llama-cpp");
    const {getLlama} = await import(pathToFileURL(found));
    const [file, size, threads] = process.argv.slice(2);
    const llama = await getLlama({gpu: false, build: "never", maxThreads: +threads, logLevel: "error", progressLogs: false});
    const model = await llama.loadModel({modelPath: file});
    context = await model.createContext({contextSize: +size, threads: +threads, flashAttention: "auto"});
    sequence = context.getSequence();
    const release = createRequire(found)("../package.json").version;
    answer({release, system: llama.systemInfo.trim()});
} catch (error) {
    answer({error: String(error.message ?? error).split("\n")[0]});
    process.exit(0);
}

// Reads tokens into an empty context.
async function read({tokens}) {
    await sequence.clearHistory();
    const start = performance.now();
    await sequence.evaluateWithoutGeneratingNewTokens(tokens);
    return since(start);
}

// Writes tokens greedily behind the context and takes them back; the seconds of each.
async function write({token, count}) {
    const before = sequence.nextTokenIndex, seconds = [];
    const tokens = sequence.evaluate([token], {temperature: 0, yieldEogToken: true});
    for (let i = 0; i < count; i++) {
        const start = performance.now();
        await tokens.next();
        seconds.push(since(start));
    }
    await tokens.return();
    await sequence.eraseContextTokenRanges([{start: before, end: sequence.nextTokenIndex}]);
    return seconds;
}

for await (const line of createInterface({input: process.stdin})) {
    const request = JSON.parse(line);
    answer({seconds: await (request.tokens ? read(request) : write(request))});
}
process.exit(0);
