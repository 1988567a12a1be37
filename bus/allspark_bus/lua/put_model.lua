-- Writes a catalogue record by compare-and-set. KEYS: record. ARGV: expected generation (0: absent), field, value, ...
-- Without fields the record is removed. Returns {1, new generation} or {0, generation that is there}.
-- A new record's generation is the time in ms, so that it exceeds every one the name had before.
local gen = tonumber(redis.call('HGET', KEYS[1], 'gen') or 0)
if gen ~= tonumber(ARGV[1]) then return {0, gen} end
if #ARGV == 1 then
  redis.call('DEL', KEYS[1])
  return {1, 0}
end
if gen == 0 then
  local time = redis.call('TIME')
  gen = time[1] * 1000 + math.floor(time[2] / 1000)
end
local fields = {'gen', string.format('%d', gen + 1)}
for i = 2, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call('HSET', KEYS[1], unpack(fields))
return {1, gen + 1}
