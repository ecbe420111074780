package natstenure

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/url"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
)

// The subjects of a stream S of the store's own layout:
//
//	S.o.TYPE.ID.t   the object, as left by the last write that changed its payload
//	S.o.TYPE.ID.r   the object, as left by a later write that kept the payload: a renewal
//	S.n.TYPE.NAME   the object that has the name, if it still has it
//	S.f.TYPE.ID     the last fenced write under that lease; only its condition matters
//
// A write of an object expects the last sequence of S.o.TYPE.ID.*, which is the object's version.
// The sequence of S.o.TYPE.ID.t changes when a term begins or ends, but not when it is renewed. It
// is the term's fencing token while the term stands, and a fenced write expects it.
//
// The keys of a key-value bucket, each with the last write as its value:
//
//	o.TYPE.ID     the object; or that it was deleted, which is a value like any other: a marker
//	              of the bucket's could be purged just when a new object has taken its place
//	n.TYPE.NAME   the object that has the name, or is about to get it
//
// A bucket has no batches of writes, so there are no fenced writes. A name is claimed by a separate
// write, before the object is written: see [Store.claim].
const (
	ofObjects = ".o."
	ofNames   = ".n."
	ofFences  = ".f."
)

// layout has the beginnings of subjects, and the endings of an object's subjects.
type layout struct{ prefix, begun, renewed, either string }

func (cfg Config) layout() layout {
	if cfg.Bucket != "" {
		return layout{prefix: "$KV." + cfg.Bucket}
	}
	return layout{cfg.Stream, ".t", ".r", ".*"}
}

// longestToken keeps a subject within the 4 KiB that a server allows for a protocol line.
const longestToken = 1000

// A token is escaped like a URL parameter, but with "=" for "%", and without the characters that
// have a meaning in a subject.
var (
	toToken   = strings.NewReplacer("%", "=", "+", "=20", ".", "=2E", "~", "=7E")
	fromToken = strings.NewReplacer("=", "%", "%", "%25")
)

// token encodes text as one token of a subject. Letters, digits, "-" and "_" stand for themselves.
func token(text string) string {
	escaped := toToken.Replace(url.QueryEscape(text))
	if len(escaped) > longestToken {
		sum := sha256.Sum256([]byte(text))
		return "==" + hex.EncodeToString(sum[:])
	}
	return escaped
}

// untoken returns the text of a token. Ok is false if only a hash of the text is left.
func untoken(token string) (text string, ok bool) {
	text, err := url.PathUnescape(fromToken.Replace(token))
	return text, err == nil
}

func pair(a, b string) string { return token(a) + "." + token(b) }

// subject returns what is common to all subjects of an object.
func (s *Store) subject(key tenure.Key) string {
	return s.prefix + ofObjects + pair(key.Type, key.ID)
}

// meta precedes the payload in an object's message, as one line of JSON.
type meta struct {
	Type    string            `json:"type"`
	ID      string            `json:"id"`
	Name    string            `json:"name,omitempty"` // of a deleted object: the name that is kept for it
	Labels  map[string]string `json:"labels,omitempty"`
	Created int64             `json:"created_us,omitempty"` // by the writers' clocks, like Updated
	Updated int64             `json:"updated_us,omitempty"`
	Deleted bool              `json:"deleted,omitempty"`
}

// encode returns a message.
func (m meta) encode(payload []byte) []byte {
	line, err := json.Marshal(m)
	if err != nil {
		panic(err) // it has only text and numbers
	}
	return append(append(line, '\n'), payload...)
}

// state is the state of a key in the stream. The zero state means that there has never been an
// object.
type state struct {
	sequence uint64
	id       string // of the write, if it has been read
	meta
	payload [sha256.Size]byte // its hash
}

// version returns the version of the object, 0 if there is none.
func (s state) version() int64 {
	if s.Deleted {
		return 0
	}
	return int64(s.sequence)
}

// decode reads the last message of an object. The key is the requested one, or the zero Key if it
// has to come from the message. A message of another program, such as the marker that `nats kv del`
// leaves, is an object with that program's data as its payload. It does not say what has become of
// the holder, so a standby waits for the TTL.
func decode(key tenure.Key, sequence uint64, data []byte, stamp time.Time) (state, tenure.Object) {
	st := state{sequence: sequence}
	line, payload, ok := bytes.Cut(data, []byte("\n"))
	ok = ok && json.Unmarshal(line, &st.meta) == nil
	if is := (tenure.Key{Type: st.Type, ID: st.ID}); !ok || is != key && key != (tenure.Key{}) {
		st.meta, payload = meta{Type: key.Type, ID: key.ID, Created: stamp.UnixMicro(), Updated: stamp.UnixMicro()}, data
	}
	st.payload = sha256.Sum256(payload)
	obj := tenure.Object{Key: key, Version: int64(sequence)}
	if !st.Deleted {
		obj.Name, obj.Labels, obj.Payload = st.Name, st.Labels, bytes.Clone(payload)
		obj.CreatedAt, obj.UpdatedAt = time.UnixMicro(st.Created).UTC(), time.UnixMicro(st.Updated).UTC()
	}
	return st, obj
}

// claim names the object that has a name.
type claim struct {
	sequence uint64
	ID       string `json:"id"`
	At       uint64 `json:"at,omitempty"` // in a bucket: the sequence of the object that gets the name; 0: there has been none
}
