package main

import (
	"encoding/json"
	"io"
	"sync"
	"time"
)

// record is one figure.
type record struct {
	Measure string  `json:"measure"`
	Peer    string  `json:"peer"`
	Metric  string  `json:"metric"`
	Value   float64 `json:"value"`
	Unit    string  `json:"unit"`
	N       int     `json:"n"` // number of samples
}

// report collects the figures of a run. Its methods are safe for concurrent use.
type report struct {
	mu      sync.Mutex
	records []record
	notes   []note
}

// note is a remark below a table.
type note struct {
	Measure string `json:"measure"`
	Peer    string `json:"peer"`
	Text    string `json:"text"`
}

func (r *report) add(measure, peer, metric string, value float64, unit string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = append(r.records, record{measure, peer, metric, value, unit, n})
}

// addQuantiles adds the median and the 99th percentile of some times, if there
// are any.
func (r *report) addQuantiles(measure, peer, metric string, took []time.Duration) {
	if len(took) == 0 {
		return
	}
	r.add(measure, peer, metric+" p50", milliseconds(percentile(took, 50)), "ms", len(took))
	r.add(measure, peer, metric+" p99", milliseconds(percentile(took, 99)), "ms", len(took))
}

func (r *report) note(measure, peer, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notes = append(r.notes, note{measure, peer, text})
}

// of returns the figures and notes of one measure.
func (r *report) of(measure string) (records []record, notes []note) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rec := range r.records {
		if rec.Measure == measure {
			records = append(records, rec)
		}
	}
	for _, n := range r.notes {
		if n.Measure == measure {
			notes = append(notes, n)
		}
	}
	return records, notes
}

// writeJSON writes everything as one document.
func (r *report) writeJSON(w io.Writer, f facts) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(struct {
		Machine facts    `json:"machine"`
		Records []record `json:"records"`
		Notes   []note   `json:"notes"`
	}{f, r.records, r.notes})
}
