"""Lua scripts that keep a namespace within its bound in any Redis, without changing that Redis's configuration.

A namespace consists of its values, `<prefix><key>` (strings with a time to live), and one LRU index, `<prefix>ledger`:
a sorted set of `<key>:<bytes>` by time of last use in microseconds. Its member '' has the negated total of bytes as its
score: total and entries share one Redis key, so neither can be lost without the other, and '' is always first.

The index may contain values that no longer exist (expired, or evicted by Redis): they count until they are the least
recently used or have not been used for a whole time to live. A value that is missing in the index is added again when
it is next looked up or stored.
"""

INDEX_NAME = "ledger"
"""The name of the LRU index behind the prefix. Part of the data format: stores of earlier versions have it."""

ENTRY_BYTES = 300
"""Bytes added for each value: what Redis needs to store one beside its own bytes (measured: 280 in Valkey 9.1)."""

_COMMON = f"""
local function now_us()
  local time = redis.call('TIME')
  return time[1] .. string.format('%06d', time[2])
end

local function used(lru, entry, bytes, at)
  if redis.call('ZADD', lru, at or now_us(), entry) == 1 then
    redis.call('ZINCRBY', lru, -(bytes + {ENTRY_BYTES}), '')
  end
end

local function drop(lru, entry, bytes)
  if redis.call('ZREM', lru, entry) == 1 then
    redis.call('ZINCRBY', lru, bytes + {ENTRY_BYTES}, '')
  end
end

local function is_sorted_set(lru)
  local kind = redis.call('TYPE', lru).ok
  return kind == 'zset' or kind == 'none'
end

-- uses: time, entry, time, entry, ...
local function all_used(lru, uses)
  if redis.call('ZADD', lru, 'XX', 'CH', unpack(uses)) < #uses / 2 then
    for at = 1, #uses, 2 do
      used(lru, uses[at + 1], tonumber(string.match(uses[at + 1], '%d+$')), uses[at])
    end
  end
end

local function key_at(keys, count, index)
  local length = #keys / count
  return string.sub(keys, (index - 1) * length + 1, index * length)
end
"""

# The scripts serve all keys of a call: a script for each costs the client about 0.1 ms of processor time.
# Values are not among KEYS but share the hash tag: one argument for all costs less. One command updates all entries in
# the index; if it changes fewer than it was given, some are missing there: then each is updated or added singly.
# pcall around the update: a hit stays a hit in a full or read-only Redis.

# Reads at most max_bytes + 1 bytes each: a foreign value of any size costs little, and a cut value fails its checksum.
LOOK_UP = f"""
-- KEYS: LRU index. ARGV: prefix, keys of one length joined, their number, max_bytes.
-- Returns the value of each key: empty if there is none, nil if it is of another type.
{_COMMON}
local prefix, keys, count, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now, values, uses = now_us(), {{}}, {{}}
for index = 1, count do
  local key = key_at(keys, count, index)
  local value = redis.pcall('GETRANGE', prefix .. key, 0, most)
  if type(value) == 'table' and not string.find(value.err, '^WRONGTYPE') then return value end
  values[index] = type(value) == 'string' and value
  if values[index] and #value > 0 and #value <= most then
    uses[#uses + 1] = now
    uses[#uses + 1] = key .. ':' .. #value
  end
end
if #uses > 0 and is_sorted_set(KEYS[1]) then pcall(all_used, KEYS[1], uses) end
return values
"""

# A prefix is only useful from its first block on, so the first value that exists becomes the most recently used.
PRESENT = f"""
-- KEYS: LRU index. ARGV: prefix, keys of one length joined, their number.
-- Returns one character for each key: 1 if it has a value, else 0.
{_COMMON}
local prefix, keys, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now, there, uses = tonumber(now_us()), {{}}, {{}}
for index = 1, count do
  local key = key_at(keys, count, index)
  local bytes = redis.pcall('STRLEN', prefix .. key)
  local found = type(bytes) == 'number' and bytes > 0
  there[index] = found and '1' or '0'
  if found then
    uses[#uses + 1] = now + count - index
    uses[#uses + 1] = key .. ':' .. bytes
  end
end
if #uses > 0 and is_sorted_set(KEYS[1]) then pcall(all_used, KEYS[1], uses) end
return table.concat(there)
"""

# The index is written before the value: if Redis stops between the two, the total is too large rather than too small.
# Values are not among KEYS but share the hash tag, so they are in the same slot of a cluster.
STORE = f"""
-- KEYS: LRU index. ARGV: prefix, ttl_ms, bound; then key, value, key, value, ... Returns how many values were evicted.
{_COMMON}
local lru, prefix, ttl, bound = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if not is_sorted_set(lru) then redis.call('DEL', lru) end
for at = 4, #ARGV, 2 do
  local key, value = ARGV[at], ARGV[at + 1]
  if redis.call('TYPE', prefix .. key).ok == 'string' then
    local old = redis.call('STRLEN', prefix .. key)
    drop(lru, key .. ':' .. old, old)
  end
  used(lru, key .. ':' .. #value, #value)
  redis.call('SET', prefix .. key, value, 'PX', ttl)
end
if redis.call('PTTL', lru) < ttl then redis.call('PEXPIRE', lru, ttl) end

local evicted, stale = 0, 0
while true do
  local oldest = redis.call('ZRANGE', lru, 1, 1, 'WITHSCORES')
  if not oldest[1] then break end
  local full = -tonumber(redis.call('ZSCORE', lru, '') or 0) > bound
  if not full then
    -- Not used for a whole time to live: the value has expired. Each value that is stored removes a few such entries.
    if stale == 4 * (#ARGV - 3) or tonumber(oldest[2]) > tonumber(now_us()) - ttl * 1000 then break end
    stale = stale + 1
  end
  local key, size = string.match(oldest[1], '^(.*):(%d+)$')
  drop(lru, oldest[1], tonumber(size))
  if redis.pcall('STRLEN', prefix .. key) == tonumber(size) then
    redis.call('UNLINK', prefix .. key)
    if full then evicted = evicted + 1 end
  end
end
return evicted
"""
