package kubetenure

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"regexp"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/tenurelib/tenure"
)

// lease has the fields of a Lease that the store reads and writes. Metadata that others have added is
// sent back unchanged. A request without managedFields leaves those as they are.
type lease struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Metadata   metadata  `json:"metadata"`
	Spec       leaseSpec `json:"spec"`
}

type metadata struct {
	Name            string            `json:"name"`
	Namespace       string            `json:"namespace,omitempty"`
	GenerateName    string            `json:"generateName,omitempty"`
	UID             string            `json:"uid,omitempty"`
	ResourceVersion string            `json:"resourceVersion,omitempty"`
	Labels          map[string]string `json:"labels,omitempty"`
	Annotations     map[string]string `json:"annotations,omitempty"`
	OwnerReferences json.RawMessage   `json:"ownerReferences,omitempty"`
	Finalizers      json.RawMessage   `json:"finalizers,omitempty"`
}

type leaseSpec struct {
	HolderIdentity       string `json:"holderIdentity"`
	LeaseDurationSeconds int32  `json:"leaseDurationSeconds,omitempty"`
	AcquireTime          string `json:"acquireTime,omitempty"`
	RenewTime            string `json:"renewTime,omitempty"`
	LeaseTransitions     int32  `json:"leaseTransitions"`
	Strategy             string `json:"strategy,omitempty"`
}

const (
	apiVersion = "coordination.k8s.io/v1"
	kind       = "Lease"

	// the store's own label and annotations
	prefix    = "tenurelib.dev/"
	ofType    = prefix + "type"    // a label: 32 hex digits of the SHA-256 of the key's type
	ofObject  = prefix + "object"  // the object without its payload, as JSON
	ofPayload = prefix + "payload" // the payload as it is, or as base64 if it is not UTF-8
	ofAbove   = prefix + "above"   // added to each resourceVersion; set by hand after a restore
	microTime = "2006-01-02T15:04:05.000000Z07:00"
)

// object is the content of an annotation.
type object struct {
	Type    string            `json:"type"`
	ID      string            `json:"id"`
	Labels  map[string]string `json:"labels,omitempty"`
	Created int64             `json:"created_us"` // by the writer's clock, like Updated
	Updated int64             `json:"updated_us"`
	Deleted bool              `json:"deleted,omitempty"` // the object was deleted
	Base64  bool              `json:"base64,omitempty"`
	Write   string            `json:"write"` // unique, as the API server skips a write that changes nothing
	Of      string            `json:"of"`    // the identity of the spec that was written with the object
}

// identity returns the part of the spec that another program changes when it takes the Lease. That
// program leaves the annotations as they are, so they count only while the identity is theirs.
func (s leaseSpec) identity() string {
	return fmt.Sprintf("%d %s %s", s.LeaseTransitions, s.AcquireTime, s.HolderIdentity)
}

// record has the fields of a lease's payload that the store needs.
type record struct {
	Holder       string `json:"holder"`
	AcquiredAtMS int64  `json:"acquired_at_ms"`
	Term         string `json:"term,omitempty"`
	TTLMS        int64  `json:"ttl_ms,omitempty"`
	Offered      bool   `json:"offered,omitempty"`
}

// specFor returns the spec that is written with a payload. Its identity, the holder's name and the
// term, is one that no other program has.
//
// The duration is one second longer than the TTL. client-go takes over once it has seen no change for
// that duration, but it compares times in whole seconds and so misses the second of two renewals
// within one second. It takes any other difference as a change, so renewTime follows the clock
// backwards too: if it waited for the clock to catch up, client-go would see no renewal.
func specFor(payload []byte, before leaseSpec, now time.Time) leaseSpec {
	s := leaseSpec{LeaseTransitions: before.LeaseTransitions, RenewTime: now.UTC().Format(microTime)}
	var r record
	if json.Unmarshal(payload, &r) != nil || r.Term == "" || r.TTLMS <= 0 || r.TTLMS/1000 > math.MaxInt32-2 { // not the record of a lease
		return s
	}
	ttl := time.Duration(r.TTLMS)*time.Millisecond + time.Second
	s.LeaseDurationSeconds = int32((ttl + time.Second - 1) / time.Second)
	s.AcquireTime = time.UnixMilli(r.AcquiredAtMS).UTC().Format(microTime)
	if r.Holder != "" || !r.Offered { // a lease offered to any replica is free for other programs, too
		s.HolderIdentity = r.Holder + "_" + r.Term
	}
	if s.HolderIdentity != "" && s.HolderIdentity != before.HolderIdentity {
		s.LeaseTransitions = (s.LeaseTransitions + 1) & math.MaxInt32
	}
	return s
}

// released returns the spec of a Lease without a holder, as client-go writes it.
func released(before leaseSpec, now time.Time) leaseSpec {
	s := specFor(nil, before, now)
	s.LeaseDurationSeconds, s.AcquireTime = 1, s.RenewTime
	return s
}

// state is a Lease as it was read or written. It is immutable. In the zero state the Lease does not
// exist.
type state struct {
	lease          // without the payload
	object         // zero if another program wrote the record
	above   int64  // the annotation
	at      int64  // the version of the last write; 0: the Lease does not exist
	payload []byte // nil in a state that the store remembers
}

// version returns the version of the object, or 0 if it does not exist. After a release the Lease
// remains: with a deleted object, or without a holder if another program released it.
func (s *state) version() int64 {
	if s.Deleted || s.object.Type == "" && s.Spec.HolderIdentity == "" {
		return 0
	}
	return s.at
}

func (s *state) tenureObject(key tenure.Key) tenure.Object {
	return tenure.Object{
		Key: key, Labels: maps.Clone(s.object.Labels), Payload: bytes.Clone(s.payload), Version: s.at,
		CreatedAt: stamp(s.Created), UpdatedAt: stamp(s.Updated),
	}
}

func stamp(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}

// decode reads a Lease. If another program has written its record, even over the store's own, the
// payload has that program's holder and duration, and no term; such a holder cannot be asked to
// release the lease.
func decode(key tenure.Key, l lease) (*state, error) {
	s := &state{lease: l}
	var err error
	if l.Kind != kind && l.Kind != "" || l.Metadata.Name == "" { // the items of a list have no kind
		return nil, fmt.Errorf("%w: the answer has no Lease: the URL is not that of a Kubernetes API", tenure.ErrSetup)
	}
	if s.at, err = strconv.ParseInt(l.Metadata.ResourceVersion, 10, 64); err != nil || s.at <= 0 {
		return nil, fmt.Errorf("%w: the resourceVersion %q of Lease %s is not a number of 63 bits", tenure.ErrSetup, l.Metadata.ResourceVersion, l.Metadata.Name)
	}
	if text := l.Metadata.Annotations[ofAbove]; text != "" {
		if s.above, err = strconv.ParseInt(text, 10, 64); err != nil || s.above < 0 || s.above > math.MaxInt64-s.at {
			return nil, fmt.Errorf("%w: the annotation %s of Lease %s is %q, and must be a number that leaves room for versions", tenure.ErrSetup, ofAbove, l.Metadata.Name, text)
		}
	}
	s.at += s.above
	if l.Spec.Strategy != "" {
		return nil, fmt.Errorf("%w: the API server elects the holder of Lease %s, by strategy %s: use another Lease", tenure.ErrSetup, l.Metadata.Name, l.Spec.Strategy)
	}
	ours := json.Unmarshal([]byte(l.Metadata.Annotations[ofObject]), &s.object) == nil && s.object.Type != ""
	if ours && (tenure.Key{Type: s.object.Type, ID: s.object.ID}) != key {
		return nil, fmt.Errorf("%w: Lease %s is that of %s/%s", tenure.ErrTaken, l.Metadata.Name, s.object.Type, s.object.ID)
	}
	text := l.Metadata.Annotations[ofPayload]
	s.payload = []byte(text)
	if ours && s.Base64 {
		s.payload, err = base64.StdEncoding.DecodeString(text)
	}
	if ours = ours && s.Of == l.Spec.identity() && err == nil; ours {
		return s, nil
	}
	r := record{Holder: l.Spec.HolderIdentity, TTLMS: int64(l.Spec.LeaseDurationSeconds) * 1000}
	acquired, _ := time.Parse(time.RFC3339Nano, l.Spec.AcquireTime)
	renewed, _ := time.Parse(time.RFC3339Nano, l.Spec.RenewTime)
	s.object = object{}
	if !acquired.IsZero() {
		r.AcquiredAtMS, s.Created = acquired.UnixMilli(), acquired.UnixMicro()
	}
	if !renewed.IsZero() {
		s.Updated = renewed.UnixMicro()
	}
	s.payload, _ = json.Marshal(r) // it has only text and numbers
	return s, nil
}

// encode returns the Lease to write over a state. It sets the object's Of and Base64.
func (s *state) encode(name, namespace string, o object, payload []byte, spec leaseSpec) lease {
	l := lease{APIVersion: apiVersion, Kind: kind, Metadata: s.Metadata, Spec: spec}
	l.Metadata.Name, l.Metadata.Namespace = name, namespace
	l.Metadata.Labels, l.Metadata.Annotations = cloned(s.Metadata.Labels), cloned(s.Metadata.Annotations)
	l.Metadata.Labels[ofType] = hashOf(o.Type)
	text := string(payload)
	if o.Base64 = !utf8.Valid(payload); o.Base64 {
		text = base64.StdEncoding.EncodeToString(payload)
	}
	o.Of = spec.identity()
	meta, err := json.Marshal(o)
	if err != nil {
		panic(err) // it has only text and numbers
	}
	l.Metadata.Annotations[ofObject], l.Metadata.Annotations[ofPayload] = string(meta), text
	if o.Deleted {
		delete(l.Metadata.Annotations, ofPayload)
	}
	return l
}

// isKeptBy reports whether the API server has stored what decides who has the lease, and for how long, as it was sent.
func (l lease) isKeptBy(stored lease) bool {
	is, was := stored.Metadata.Annotations, l.Metadata.Annotations
	return is[ofObject] == was[ofObject] && is[ofPayload] == was[ofPayload] &&
		stored.Spec.identity() == l.Spec.identity() && stored.Spec.LeaseDurationSeconds == l.Spec.LeaseDurationSeconds
}

// withoutPayload returns the state for the store to remember: the next write brings its own payload.
func (s *state) withoutPayload() *state {
	without := *s
	without.payload = nil
	without.Metadata.Annotations = cloned(s.Metadata.Annotations)
	delete(without.Metadata.Annotations, ofPayload)
	return &without
}

func cloned(m map[string]string) map[string]string {
	if m == nil {
		return make(map[string]string)
	}
	return maps.Clone(m)
}

var label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// nameOf returns the default name of a key's Lease.
func nameOf(key tenure.Key) string {
	if label.MatchString(key.ID) && label.MatchString(key.Type) {
		return key.ID + "." + key.Type
	}
	text, _ := key.MarshalText() // its error is always nil
	return "tenure-" + hashOf(string(text))
}

// hashOf returns 32 hex digits.
func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:16])
}

// keyIn returns the key that is stored in a Lease, even if another program has taken it since.
func (l lease) keyIn() (tenure.Key, bool) {
	var o object
	err := json.Unmarshal([]byte(l.Metadata.Annotations[ofObject]), &o)
	key := tenure.Key{Type: o.Type, ID: o.ID}
	return key, cmp.Or(err, key.Validate()) == nil
}
