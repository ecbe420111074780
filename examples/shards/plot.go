package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"
	"time"
)

// plot is who worked for which shard, and when.
type plot struct {
	began time.Time

	mu    sync.Mutex
	spans [count][]span
	marks []mark
}

// span is a time in which one process worked for a shard.
type span struct {
	name     string
	from, to float64 // in seconds; to is 0 as long as it works
}

type mark struct {
	at   float64
	what string
}

func newPlot() *plot { return &plot{began: time.Now()} }

func (p *plot) at() float64 { return time.Since(p.began).Seconds() }

func (p *plot) mark(what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.marks = append(p.marks, mark{p.at(), what})
}

// note notes when a process, by its own account, has begun or ended to work for a shard.
func (p *plot) note(name, what, id string, when time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	shard, err := strconv.Atoi(id)
	if err != nil || shard < 0 || shard >= count {
		return
	}
	spans, at := p.spans[shard], when.Sub(p.began).Seconds()
	if what == "begin" {
		p.spans[shard] = append(spans, span{name: name, from: at})
		return
	}
	for i := range spans {
		if spans[i].name == name && spans[i].to == 0 {
			spans[i].to = at
		}
	}
}

// gone notes that a process works for nothing any more.
func (p *plot) gone(name string) {
	for shard := range count {
		p.note(name, "end", strconv.Itoa(shard), time.Now())
	}
}

// judge returns an error if a shard had two owners, or has none now.
func (p *plot) judge() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for shard, spans := range p.spans {
		slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.from, b.from) })
		for i := 1; i < len(spans); i++ {
			if before, next := spans[i-1], spans[i]; before.to == 0 || before.to > next.from {
				return fmt.Errorf("shard %d had two owners: %s began after %.4f s while %s worked for it", shard, next.name, next.from, before.name)
			}
		}
		if len(spans) == 0 || spans[len(spans)-1].to != 0 {
			return fmt.Errorf("nobody works for shard %d", shard)
		}
	}
	return nil
}

// owner returns who works for a shard at a time.
func (p *plot) owner(shard int, at float64) string {
	for _, s := range p.spans[shard] {
		if s.from <= at && (s.to == 0 || at < s.to) {
			return s.name
		}
	}
	return "."
}

// text prints a line for each shard, with a letter for every quarter of a second.
func (p *plot) text(out io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	const step = 0.25
	end := p.at()
	for shard := range count {
		line := []byte{}
		for at := step; at < end; at += step {
			line = append(line, p.owner(shard, at)[0])
		}
		fmt.Fprintf(out, "%2d %s\n", shard, line)
	}
}

// svg draws a bar for each span, in the color of its process.
func (p *plot) svg() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	const perSecond, row, left, top = 40, 6, 30, 40
	colors := map[string]string{"A": "#4e79a7", "B": "#f28e2b", "C": "#59a14f", "D": "#e15759", "E": "#b07aa1", "F": "#edc948", "G": "#76b7b2"}
	end := p.at()
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%d" font-family="sans-serif" font-size="11">`+"\n", left+end*perSecond+60, top+count*row+45)
	fmt.Fprintln(&b, `<title>Who works for which of 64 shards over time</title>`)
	fmt.Fprintln(&b, `<rect width="100%" height="100%" fill="white"/>`)
	for shard, spans := range p.spans {
		for _, s := range spans {
			to := s.to
			if to == 0 {
				to = end
			}
			fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", left+s.from*perSecond, top+shard*row, (to-s.from)*perSecond, row-1, colors[s.name])
		}
	}
	for _, m := range p.marks {
		x := left + m.at*perSecond
		fmt.Fprintf(&b, `<path d="M%.1f %d V%d" stroke="black" stroke-dasharray="3"/><text x="%.1f" y="%d">%s</text>`+"\n", x, top-12, top+count*row, x+3, top-14, m.what)
	}
	for second := 0; float64(second) <= end; second += 5 {
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">%d s</text>`+"\n", left+second*perSecond, top+count*row+12, second)
	}
	for _, shard := range []int{0, count - 1} {
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%d</text>`+"\n", left-4, top+shard*row+7, shard)
	}
	for i, name := range []string{"A", "B", "C", "D", "E", "F", "G"} {
		x := left + i*50
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="10" height="10" fill="%s"/><text x="%d" y="%d">%s</text>`+"\n", x, top+count*row+25, colors[name], x+14, top+count*row+34, name)
	}
	fmt.Fprintln(&b, `</svg>`)
	return b.Bytes()
}
