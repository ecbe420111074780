package main

import (
	"bytes"
	"fmt"
	"time"
)

// The picture is as wide as a phone, in units of a pixel there.
const (
	width     = 440
	left      = 50 // of the first second
	perSecond = 54
	rowHeight = 36
	barHeight = 20
)

const style = `
text { font: 12px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: #1f2328 }
.muted { fill: #59636e }
.in { fill: #fff; text-anchor: middle }
line { stroke: #59636e; stroke-width: 1.5 }
.grid { stroke: #59636e33; stroke-width: 1 }
.works { fill: #0969da }
.cut { fill: #bc4c00 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.muted { fill: #9198a1 }
line { stroke: #9198a1 }
.grid { stroke: #9198a133 }
.works { fill: #1f6feb }
}
`

// svg draws a row for each replica. Times are rounded to a tenth of a second, so that each run
// draws the same.
func (t *timeline) svg() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	var rows []string
	ofRow := map[string][]moment{}
	last := time.Duration(0)
	for _, m := range t.moments {
		if ofRow[m.replica] == nil {
			rows = append(rows, m.replica)
		}
		m.at = m.at.Round(100 * time.Millisecond)
		ofRow[m.replica], last = append(ofRow[m.replica], m), m.at
	}
	x := func(at time.Duration) float64 { return left + perSecond*at.Seconds() }

	var b bytes.Buffer
	bottom := len(rows)*rowHeight + 4
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n", width, bottom+20, width*3/2, (bottom+20)*3/2)
	fmt.Fprintf(&b, "<title>Three replicas, of which one at a time works</title>\n<style>%s</style>\n", style)
	for second := time.Duration(0); second <= last; second += time.Second {
		fmt.Fprintf(&b, "<line class=\"grid\" x1=\"%.1f\" y1=\"4\" x2=\"%.1[1]f\" y2=\"%d\"/>\n", x(second), bottom)
		fmt.Fprintf(&b, "<text class=\"muted\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.0f s</text>\n", x(second), bottom+14, second.Seconds())
	}
	for i, name := range rows {
		middle := float64(i*rowHeight + rowHeight/2 + 4)
		fmt.Fprintf(&b, "<text x=\"0\" y=\"%.1f\">%s</text>\n", middle+4, name)
		for j, m := range ofRow[name] {
			until := last
			if j+1 < len(ofRow[name]) {
				until = ofRow[name][j+1].at
			}
			if until == m.at {
				continue
			}
			from, to := x(m.at), x(until)
			switch m.does {
			case standsBy:
				fmt.Fprintf(&b, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1[2]f\"/>\n", from, middle, to)
				fmt.Fprintf(&b, "<text class=\"muted\" x=\"%.1f\" y=\"%.1f\">%s</text>\n", from+6, middle-5, m.note)
			case works, isCutOff:
				class, text := "works", "works"
				if m.does == isCutOff {
					class, text = "cut", "cut off"
				}
				fmt.Fprintf(&b, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\"/>\n", class, from, middle-barHeight/2, to-from, barHeight)
				fmt.Fprintf(&b, "<text class=\"in\" x=\"%.1f\" y=\"%.1f\">%s</text>\n", (from+to)/2, middle+4, text)
			case ends:
				fmt.Fprintf(&b, "<text class=\"muted\" x=\"%.1f\" y=\"%.1f\">%s</text>\n", from+6, middle+4, m.note)
			}
		}
	}
	fmt.Fprintln(&b, "</svg>")
	return b.Bytes()
}
