// Write the JSON schemas of 60 everyday zod types, one a line: {"name": …, "schema": …}.
//
// usage: cd FOLDER && npm install zod zod-to-json-schema
//        node …/scripts/reference/everyday_types.mjs > …/tests/cases/schemas/zod.jsonl
//
// zod comes from the current folder. The first types are written by zod 4 itself (z.toJSONSchema),
// the others by zod-to-json-schema, which writes those of zod 3.

import { createRequire } from "node:module";

const require = createRequire(process.cwd() + "/");
const { z } = require("zod");
const z3 = require("zod/v3").z;
const { zodToJsonSchema } = require("zod-to-json-schema");

const Color = z.enum(["red", "green", "blue"]);
const Address = z.object({
  street: z.string().describe("Street and number"),
  city: z.string(),
  zip: z.string().regex(/^\d{5}(-\d{4})?$/),
});
const Person = z.object({
  name: z.string().min(1).max(50),
  age: z.int().min(0).max(150),
  address: Address.nullable(),
  tags: z.array(z.string()).default([]),
});
const Cat = z.object({ kind: z.literal("cat"), lives: z.number().int() });
const Dog = z.object({ kind: z.literal("dog"), good: z.boolean().optional() });
const Tree = z.object({
  value: z.number(),
  get children() {
    return z.array(Tree);
  },
});
const Link = z.object({
  text: z.string(),
  get next() {
    return Link.nullable();
  },
});
const Json = z.json();

const four = {
  Address,
  Person,
  "discriminatedUnion": z.discriminatedUnion("kind", [Cat, Dog]),
  "object with a discriminatedUnion": z.object({ pet: z.discriminatedUnion("kind", [Cat, Dog]) }),
  "union of models": z.union([Cat, Dog, z.null()]),
  Tree,
  Link,
  "Reasoning of OpenAI's guide": z.object({
    steps: z.array(z.object({ explanation: z.string(), output: z.string() })),
    final_answer: z.string(),
  }),
  "CalendarEvent of OpenAI's guide": z.object({
    name: z.string(),
    date: z.string(),
    participants: z.array(z.string()),
  }),
  "strictObject": z.strictObject({ a: z.number() }),
  "looseObject": z.looseObject({ a: z.number() }),
  "catchall": z.object({ a: z.string() }).catchall(z.number()),
  "record": z.record(z.string(), z.number()),
  "record of enum": z.record(Color, z.number()),
  "partialRecord": z.partialRecord(Color, z.number()),
  "record of patterned keys": z.record(z.string().regex(/^k/), z.boolean()),
  "record in an object": z.object({ scores: z.record(z.string(), z.array(z.number())) }),
  "partial": Address.partial(),
  "extend": Person.extend({ salary: z.number().positive() }),
  "pick": Person.pick({ name: true, age: true }),
  "intersection": z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
  "tuple": z.tuple([z.string(), z.number(), z.boolean()]),
  "tuple with rest": z.tuple([z.string()], z.number()),
  "array with bounds": z.array(z.int()).min(1).max(3),
  "enum": Color,
  "native enum": z.enum({ LOW: 1, HIGH: 2 }),
  "literals": z.literal(["a", 1, true, null]),
  "nullish": z.object({ a: z.string().nullish(), b: z.number().optional() }),
  "default and catch": z.object({ a: z.number().default(3), b: z.boolean().catch(false) }),
  "safe int": z.int(),
  "int32, uint32 and float32": z.object({ a: z.int32(), b: z.uint32(), c: z.float32() }),
  "number with bounds": z.number().gt(0).lt(1).multipleOf(0.25),
  "email": z.email(),
  "url": z.url(),
  "uuid": z.uuid(),
  "iso.datetime": z.iso.datetime(),
  "iso.date and iso.time": z.object({ day: z.iso.date(), at: z.iso.time() }),
  "iso.duration": z.iso.duration(),
  "ipv4 and ipv6": z.object({ a: z.ipv4(), b: z.ipv6(), c: z.cidrv4() }),
  "cuid2, ulid and nanoid": z.object({ a: z.cuid2(), b: z.ulid(), c: z.nanoid() }),
  "base64": z.base64(),
  "startsWith and endsWith": z.string().startsWith("a").endsWith("z").includes("-"),
  "meta": z.object({ a: z.string().meta({ title: "A", examples: ["x"], id: "the-a" }) }),
  "readonly and brand": z.object({ a: z.array(z.string()).readonly(), b: z.string().brand("B") }),
  "any and unknown": z.object({ a: z.any(), b: z.unknown(), c: z.null() }),
  "templateLiteral": z.templateLiteral(["v", z.number()]),
  Json,
};

const Category = z3.object({ name: z3.string(), parent: z3.lazy(() => Category).nullable() });
const User = z3.object({ id: z3.number().int().positive(), mail: z3.string().email() });
const Created = z3.object({ type: z3.literal("created"), at: z3.string().datetime() });
const Deleted = z3.object({ type: z3.literal("deleted"), by: User });

const three = {
  "3: recursive": Category,
  "3: object": z3.object({ user: User, friends: z3.array(User).max(5) }),
  "3: discriminatedUnion": z3.discriminatedUnion("type", [Created, Deleted]),
  "3: passthrough": User.passthrough(),
  "3: strict": User.strict(),
  "3: record": z3.record(z3.string().min(2), z3.number()),
  "3: record of enum": z3.record(z3.enum(["a", "b"]), z3.string()),
  "3: nullable union": z3.union([z3.string(), z3.number()]).nullable(),
  "3: nativeEnum": z3.nativeEnum({ A: "a", B: "b" }),
  "3: date": z3.object({ at: z3.date() }),
  "3: and": User.and(z3.object({ role: z3.enum(["admin", "guest"]) })),
  "3: tuple and default": z3.tuple([z3.number().default(1), z3.string().uuid()]),
  "3: map and set": z3.object({ a: z3.map(z3.string(), z3.number()), b: z3.array(z3.bigint()) }),
};

const lines = [
  ...Object.entries(four).map(([name, kind]) => [name, z.toJSONSchema(kind)]),
  ...Object.entries(three).map(([name, kind]) => [
    name,
    zodToJsonSchema(kind, name === "3: object" ? { name: "Model" } : {}),
  ]),
];
for (const [name, schema] of lines) {
  process.stdout.write(JSON.stringify({ name, schema }) + "\n");
}
