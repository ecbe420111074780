package etcdtenure

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/tenurelib/tenure"
)

// The keys of a store with the prefix P:
//
//	P epoch        what versions are counted from
//	P o/TYPE/ID    the object
//	P t/TYPE/ID    the SHA-256 of its payload; written when that changes
//	P n/TYPE/NAME  the ID of the object that has the name
//
// An object's version is that of the epoch plus the revision of P o/TYPE/ID. The revision of
// P t/TYPE/ID changes when a term begins or ends, but not when it is renewed. It gives the
// term's fencing token while the term stands, and a fenced write compares it. All keys of an
// object are written by one transaction. Slashes within a TYPE are escaped; the ID or name that
// follows is not, so that a range is in the order of its bytes.
const (
	ofEpoch   = "epoch"
	ofObjects = "o/"
	ofTerms   = "t/"
	ofNames   = "n/"
)

// keyOf returns the etcd key of the given kind for a key or a name.
func (s *shared) keyOf(kind string, key tenure.Key) string {
	text, _ := key.MarshalText() // it has no error
	return s.cfg.Prefix + kind + string(text)
}

// idOf returns the ID of an object by its etcd key.
func (s *shared) idOf(etcdKey []byte) string {
	_, id, _ := strings.Cut(strings.TrimPrefix(string(etcdKey), s.cfg.Prefix+ofObjects), "/")
	return id
}

// epoch is what versions are counted from. Above is the time at which it began, in microseconds, so
// versions continue above those of a cluster whose revisions were greater.
type epoch struct {
	Above   int64  `json:"above"`
	Cluster uint64 `json:"cluster,string"` // whose revisions it counts

	text string // as it is stored
}

// leap is added if an unknown number of revisions may have been lost.
const leap = 1 << 32

// beginEpoch returns an epoch above a version.
func beginEpoch(cluster uint64, version int64) epoch {
	e := epoch{Above: max(time.Now().UnixMicro(), version+leap), Cluster: cluster}
	text, err := json.Marshal(e)
	if err != nil {
		panic(err) // it has only numbers
	}
	e.text = string(text)
	return e
}

func decodeEpoch(text []byte) (epoch, error) {
	e := epoch{text: string(text)}
	err := json.Unmarshal(text, &e)
	return e, err
}

func (e epoch) version(revision int64) int64 { return e.Above + revision }

// meta precedes the payload in an object's value, as one line of JSON.
type meta struct {
	Type    string            `json:"type"`
	ID      string            `json:"id"`
	Name    string            `json:"name,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	Created int64             `json:"created_us,omitempty"` // by the writers' clocks, like Updated
	Updated int64             `json:"updated_us,omitempty"`
	Write   string            `json:"write,omitempty"` // different for each write: see [Store.write]
}

// encode returns a value.
func (m meta) encode(payload []byte) string {
	line, err := json.Marshal(m)
	if err != nil {
		panic(err) // it has only text and numbers
	}
	return string(append(append(line, '\n'), payload...))
}

// state is the state of a key in etcd. The zero state means that there is no object.
type state struct {
	revision int64 // of the last write; 0: there is no object
	meta
	payload [sha256.Size]byte // its hash
}

// version returns the version of the object, 0 if there is none.
func (s state) version(e epoch) int64 {
	if s.revision == 0 {
		return 0
	}
	return e.version(s.revision)
}

// decode reads an object. A value of another program is an object with that value as its
// payload.
func decode(e epoch, key tenure.Key, kv *mvccpb.KeyValue) (state, tenure.Object) {
	st := state{revision: kv.ModRevision}
	line, payload, ok := bytes.Cut(kv.Value, []byte("\n"))
	ok = ok && json.Unmarshal(line, &st.meta) == nil
	if !ok || (tenure.Key{Type: st.Type, ID: st.ID}) != key {
		st.meta, payload = meta{Type: key.Type, ID: key.ID}, kv.Value
	}
	st.payload = sha256.Sum256(payload)
	return st, tenure.Object{
		Key: key, Name: st.Name, Labels: st.Labels, Payload: bytes.Clone(payload), Version: e.version(st.revision),
		CreatedAt: stamp(st.Created), UpdatedAt: stamp(st.Updated),
	}
}

func stamp(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}
