// Submits one request over ZeroMQ, reads its tokens from its Redis stream, releases it.
// Everything here follows docs/wire-protocol.md; no code of the fleet is used.
//
//   node producer.mjs FRONTEND REDIS MODEL NEW_TOKENS ID...
//   node producer.mjs tcp://127.0.0.1:5550 redis://127.0.0.1:6379/0 smollm2 16 504 3575 282 4649
//
// Prints one JSON object: {"uuid": …, "tokens": […], "status": 3, "reason": "length"}.
import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import path from "node:path";
import { decode } from "@msgpack/msgpack";
import Redis from "ioredis";
import protobuf from "protobufjs";
import { Dealer } from "zeromq";

const HEADER = Buffer.from("ALSP\x01", "latin1");
const TENANT = "default";
const RESEND_MS = 1000;
const INT64 = 6;

const [frontend, redisUrl, model, newTokens, ...ids] = process.argv.slice(2);
if (ids.length === 0) {
  console.error("usage: node producer.mjs FRONTEND REDIS MODEL NEW_TOKENS ID...");
  process.exit(2);
}

function loadContract() {
  const protoDir = path.join(path.dirname(fileURLToPath(import.meta.url)), "..", "..", "proto");
  const root = new protobuf.Root();
  root.resolvePath = (_, target) => path.join(protoDir, path.basename(target));
  root.loadSync("fleet.proto", { keepCase: true });
  return { Envelope: root.lookupType("allspark.fleet.Envelope"), Reply: root.lookupType("allspark.fleet.Reply") };
}

// Sends an envelope until it is answered: every call is idempotent, so sending it twice does no harm.
async function call(socket, { Envelope, Reply }, body) {
  const correlation_id = randomUUID();
  const payload = Envelope.encode(Envelope.create({ version: 1, correlation_id, tenant: TENANT, ...body })).finish();
  socket.receiveTimeout = RESEND_MS;
  for (;;) {
    await socket.send([HEADER, payload]);
    try {
      for (;;) {
        const [header, answer] = await socket.receive();
        if (!header.equals(HEADER)) throw new Error(`unknown protocol ${header.toString("hex")}`);
        const reply = Reply.decode(answer);
        if (reply.correlation_id !== correlation_id) continue;
        if (reply.as_status !== 0) throw new Error(`status ${reply.as_status}: ${reply.reason}`);
        return reply;
      }
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
    }
  }
}

function startRequest(uuid) {
  const data = Buffer.alloc(8 * ids.length);
  ids.forEach((id, i) => data.writeBigInt64LE(BigInt(id), 8 * i));
  const input_ids = { shape: { dims: [1, ids.length] }, data_type: INT64, data };
  return {
    model_name: model,
    inputs: { tensor_map: { input_ids } },
    config: { uuid, max_length: ids.length + Number(newTokens) },
  };
}

// Reads entries in order until the terminal one. An entry id is "<tokens so far>-<1 if terminal>".
async function readStream(redis, uuid) {
  const key = `as:out:{${TENANT}/${uuid}}`;
  const tokens = [];
  for (let last = "0-0"; ; ) {
    const found = await redis.xreadBuffer("BLOCK", 5000, "STREAMS", key, last);
    for (const [id, [, record]] of found?.[0][1] ?? []) {
      last = id.toString();
      const r = decode(record);
      if (r.v !== 1) throw new Error(`unknown record version ${r.v}`);
      if (r.p !== tokens.length) throw new Error(`gap: position ${r.p} after ${tokens.length} tokens`);
      tokens.push(...(r.t ?? []));
      if (r.s) return { tokens, status: r.s, reason: r.r };
    }
  }
}

const contract = loadContract();
const socket = new Dealer({ linger: 0 });
socket.connect(frontend);
const redis = new Redis(redisUrl);
const uuid = randomUUID();
await call(socket, contract, { start_request: startRequest(uuid) });
const result = await readStream(redis, uuid);
await call(socket, contract, { release_request: { uuid } });
console.log(JSON.stringify({ uuid, ...result }));
redis.disconnect();
socket.close();
