package tenure

import (
	"database/sql"
	"encoding/json"
	"time"
)

// row is an object as both databases store it.
type row struct {
	name    sql.NullString
	labels  []byte
	payload []byte
	version int64
	created sql.NullInt64 // Unix milliseconds, as is updated; NULL where another program has left none
	updated sql.NullInt64
}

func (r row) object(key Key, now time.Time) Object {
	return Object{
		Key:       key,
		Name:      r.name.String,
		Labels:    decodeLabels(r.labels),
		Payload:   r.payload,
		Version:   r.version,
		CreatedAt: stamp(r.created),
		UpdatedAt: stamp(r.updated),
		Age:       age(r.updated, now),
	}
}

// written is the object that a write has stored.
func (r row) written(obj Object) Object {
	obj.Version = r.version
	obj.CreatedAt = stamp(r.created)
	obj.UpdatedAt = stamp(r.updated)
	obj.Age = 0
	return obj
}

// stamp is the time that a row names: the zero time where it names none.
func stamp(ms sql.NullInt64) time.Time {
	if !ms.Valid {
		return time.Time{}
	}
	return time.UnixMilli(ms.Int64)
}

// age returns how long ago a row was stamped. The stamp was cut to milliseconds,
// so the write may have been up to one later. A row without a stamp may be new.
func age(updatedMS sql.NullInt64, now time.Time) time.Duration {
	if !updatedMS.Valid {
		return 0
	}
	switch d := now.Sub(stamp(updatedMS)); { // Sub saturates, so that no stamp overflows
	case d >= time.Millisecond:
		return d - time.Millisecond
	case d >= 0:
		return 0
	default:
		return d
	}
}

// nameColumn returns NULL for an empty name, so that any number of objects may
// have none.
func nameColumn(name string) sql.NullString {
	return sql.NullString{String: name, Valid: name != ""}
}

func encodeLabels(labels map[string]string) string {
	if len(labels) == 0 {
		return "{}"
	}
	b, _ := json.Marshal(labels) // strings always encode
	return string(b)
}

// decodeLabels reads what any program may have stored: what is no string stays
// as its JSON text. Labels are told to people, and must not make a lease
// unreadable.
func decodeLabels(b []byte) map[string]string {
	var raw map[string]json.RawMessage
	if json.Unmarshal(b, &raw) != nil || len(raw) == 0 {
		return nil
	}
	labels := make(map[string]string, len(raw))
	for k, v := range raw {
		var s string
		if json.Unmarshal(v, &s) != nil {
			s = string(v)
		}
		labels[k] = s
	}
	return labels
}
